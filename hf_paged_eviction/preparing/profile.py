"""The result of `prepare`."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from ..learned.calibration import Calibration
from ..learned.measured import ASPECTS, BYTES, FULL_BITS, RANDOM, TOKENS, Measured, Row, Use, pair

#: Caches of a table, besides random eviction.
_LINES = 5
#: Columns of a line; of them those of a label, and of each of three numbers.
_WIDE, _LABEL, _NUMBER = 80, 55, 8
_OF = {TOKENS: "the tokens", BYTES: f"the bytes in {FULL_BITS} bits"}
_COLUMNS = {
    "text": "text: it goes on",
    "unknown": "unknown: compress first, then ask",
    "known": "known: the question is in the prompt when it is compressed",
}


@dataclass(frozen=True)
class Profile:
    """The profile of a model: what `prepare` measured. `print` shows it as a table.

    Attributes:
        path: its file.
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
        measured = self.calibration.measured
        lines = [f"profile {self.path}"]
        for unit in (TOKENS, BYTES):
            best = self.best(unit)
            if measured is None or best is None:
                lines += ["", f"budget in {unit}: nothing was measured"]
            else:
                heading = f"budget in {unit}: {best.label}"
                start = [heading] if len(heading) <= _WIDE else [f"budget in {unit}:", f"  {best.label}"]
                lines += ["", *start, *self._table(measured, best)]
        if measured is not None:
            lines += [
                "",
                "Nats per token of divergence from the full cache, which is that of a",
                f"model in {measured.dtype}; lower is better.",
                *(f"  {_COLUMNS[aspect]}" for aspect in ASPECTS),
            ]
        return "\n".join(lines)

    def _table(self, measured: Measured, best: Row) -> Iterable[str]:
        unit = best.unit
        scores = measured.scores(unit, self.use)
        shown = [*sorted(scores, key=lambda label: scores[label])[:_LINES], RANDOM]
        aspects = [aspect for aspect in ASPECTS if any(aspect in row.divergences for row in measured.rows)]
        for share in sorted({row.share for row in measured.rows if row.unit == unit}, reverse=True):
            yield f"  {Fraction(share).limit_denominator(99)} of {_OF[unit]}".ljust(_LABEL) + "".join(
                f"{aspect:>{_NUMBER}}" for aspect in aspects
            )
            rows = {row.label: row for row in measured.rows if (row.unit, row.share) == (unit, share)}
            for row in (rows[label] for label in shown if label in rows):
                numbers = "".join(f"{_number(row, aspect):>{_NUMBER}}" for aspect in aspects)
                start = f"    {_name(row, best)}"
                if len(start) > _LABEL:
                    yield start
                    start = ""
                yield start.ljust(_LABEL) + numbers


def _name(row: Row, best: Row) -> str:
    """What a row is called in a table: of the best cache for bytes, its bits."""
    if row.unit == TOKENS or (row.policy, row.allocator) != (best.policy, best.allocator):
        return row.label
    keys, values = (bits or FULL_BITS for bits in pair(row.bits))
    if keys == values:
        return f"{keys} bits"
    return f"keys in {keys} bits, values in {values}"


def _number(row: Row, aspect: str) -> str:
    return f"{row.mean(aspect):.3f}" if aspect in row.divergences else ""
