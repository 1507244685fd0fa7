"""The result of `prepare`."""

from dataclasses import dataclass

from ..learned.calibration import Calibration
from ..learned.measured import ASPECTS, BYTES, TOKENS, Row, Use

_LINES = 8
_SHORT = dict(zip(ASPECTS, ("text", "unknown", "known"), strict=True))


@dataclass(frozen=True)
class Profile:
    """The profile of a model: what `prepare` measured. `print` shows it as a table.

    Attributes:
        path: its file, its name, or a repository on the Hub.
        calibration: scores, budgets of heads, and the rows of the table.
        use: criterion by which the best cache is chosen, see `prepare`.
    """

    path: str
    calibration: Calibration
    use: Use

    def best(self, unit: str = TOKENS) -> Row | None:
        """The best cache for budgets in "tokens" or in "bytes"; None if none was measured."""
        measured = self.calibration.measured
        return None if measured is None else measured.best(unit, self.use)

    def __str__(self) -> str:
        lines = [f"profile {self.path}"]
        for unit in (TOKENS, BYTES):
            lines += self._table(unit)
        return "\n".join(lines)

    def _table(self, unit: str) -> list[str]:
        measured, best = self.calibration.measured, self.best(unit)
        if measured is None or best is None:
            return [f"budget in {unit}: nothing was measured"]
        scores = measured.scores(unit, self.use)
        shares = sorted({row.share for row in measured.rows if row.unit == unit}, reverse=True)
        wide = max(len(label) for label in [*scores, "random"]) + 4
        lines = [
            f"budget in {unit}: {best.label} (KL divergence from the full cache, nats per token; unknown: compressed "
            "before the question, known: with it)",
            "  cache".ljust(wide)
            + "".join(f"{f'{share:.3g} {_SHORT[aspect]}':>13}" for share in shares for aspect in ASPECTS),
        ]
        for label in [*sorted(scores, key=lambda name: scores[name])[:_LINES], "random"]:
            rows = {row.share: row for row in measured.rows if (row.unit, row.label) == (unit, label)}
            numbers = (
                f"{rows[share].mean(aspect):.3f}" if aspect in rows[share].divergences else ""
                for share in shares
                for aspect in ASPECTS
            )
            lines.append(f"  {label}".ljust(wide) + "".join(f"{number:>13}" for number in numbers))
        return lines
