"""What `verify` found."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...policies.needs import Heads
from .distances import Distances
from .precision import FewBits
from .rotation import Rotation

Question = Literal["same as DynamicCache", "exact for what it holds", "row as alone", "same with what comes back"]
CallNames = Literal["one forward", "chunks", "steps"]
Mode = Literal["dynamic", "static"]
Budgets = Literal["equal", "per layer"]
Outcome = Literal["exact", "refused", "wrong", "not covered"]


@dataclass(frozen=True)
class Check:
    """One comparison of this cache with something that is known to be right.

    Attributes:
        question: which promise was put to the test.
        attention: the attention implementation that this cache ran under.
        calls: how the text was fed: the prompt in one forward and a few tokens, in chunks of several tokens, or token
            by token after a short beginning.
        heads: one decision for all KV heads of a layer, or one for each.
        mode: `static=True` or not (never compiled here).
        policy: what evicts.
        disposal: what becomes of what is evicted.
        budgets: one budget for all layers, or a list that differs between them.
        outcome: "exact"; "refused", by an error of this package that says why; "wrong"; "not covered", where there
            is nothing to compare with.
        error: largest difference of a logit, in standard deviations of the logits; None where none was measured.
        effect: how much the evictions themselves changed the logits (or would have, had the tokens been dropped), in
            the same unit: what an error has to be compared with. None where it was not measured.
        reason: why the outcome is not "exact", or what there is to know if it is; may be empty.
    """

    question: Question
    attention: str
    calls: CallNames
    heads: Heads
    mode: Mode
    policy: str
    budgets: Budgets
    outcome: Outcome
    error: float | None = None
    effect: float | None = None
    reason: str = ""
    disposal: str = "drop"


@dataclass(frozen=True)
class Verification:
    """What `verify` found; as text, a table.

    Attributes:
        model: name of its class.
        dtype: of its weights.
        device: of its first weights.
        tolerance: largest `Check.error` that counts as rounding.
        noise: how far rounding alone was seen to move a logit, in standard deviations of the logits.
        checks: one for each line of the table.
        notes: what was seen of the model itself.
        rotation: whether its keys can be unrotated; None where that was not looked at.
        distances: whether its keys can be turned to other positions; None where that was not looked at.
        few_bits: what `bits=` would cost this model; None where that was not looked at.
    """

    model: str
    dtype: str
    device: str
    tolerance: float
    noise: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    rotation: Rotation | None = None
    distances: Distances | None = None
    few_bits: FewBits | None = None

    def _with(self, outcome: Outcome) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome == outcome)

    @property
    def exact(self) -> tuple[Check, ...]:
        """Checks without a difference beyond rounding."""
        return self._with("exact")

    @property
    def refused(self) -> tuple[Check, ...]:
        """Checks that an error of this package stopped, which says why."""
        return self._with("refused")

    @property
    def wrong(self) -> tuple[Check, ...]:
        """Checks with a difference, or an error that nobody meant to raise."""
        return self._with("wrong")

    @property
    def not_covered(self) -> tuple[Check, ...]:
        """Checks with nothing to compare with."""
        return self._with("not covered")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. What was refused or not covered is no fault, and no promise either."""
        return not self.wrong and all(found is None or found.ok for found in (self.rotation, self.distances))

    def __str__(self) -> str:
        found = {(check.outcome, check.reason) for check in self.checks}
        if len(found) == 1 and self.checks[0].error is None:
            return f"{self._title()}\n{self.checks[0].reason}"
        reasons = list(dict.fromkeys(check.reason for check in self.checks if check.reason))
        table = _table([_HEAD, *(_cells(check, reasons) for check in self.checks)])
        return "\n".join(
            (
                *(self._title(), *self.notes),
                *(str(found) for found in (self.rotation, self.distances, self.few_bits) if found is not None),
                *("", *table, ""),
                f"Errors and effects are in standard deviations of the logits. Up to {self.tolerance:.1e} counts as "
                f"rounding; {self.noise:.1e} was seen.",
                *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)),
            )
        )

    def _title(self) -> str:
        counts = Counter(check.outcome for check in self.checks)
        said = ", ".join(f"{counts[name]} {_shown(name)}" for name in _OUTCOMES if counts[name])
        return f"{self.model}, {self.dtype} on {self.device}: {said}"


_HEAD = ("question", "attention", "calls", "heads", "mode", "budgets", "policy", "outcome", "error", "effect", "")
_OUTCOMES: tuple[Outcome, ...] = ("wrong", "exact", "refused", "not covered")


def _shown(outcome: Outcome) -> str:
    return "WRONG" if outcome == "wrong" else outcome


def _cells(check: Check, reasons: Sequence[str]) -> tuple[str, ...]:
    numbers = ["" if number is None else f"{number:.1e}" for number in (check.error, check.effect)]
    note = f"[{reasons.index(check.reason) + 1}]" if check.reason else ""
    policy = check.policy if check.disposal == "drop" else f"{check.policy}, {check.disposal}"
    settings = (check.question, check.attention, check.calls, check.heads, check.mode, check.budgets, policy)
    return (*settings, _shown(check.outcome), *numbers, note)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
