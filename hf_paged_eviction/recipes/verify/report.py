"""What `verify` found."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...policies.needs import Heads

Question = Literal["same as DynamicCache", "exact for what it holds", "row as alone"]
CallNames = Literal["one forward", "chunks", "steps"]
Mode = Literal["dynamic", "static", "unequal budgets"]
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
        policy: what evicts.
        budget: tokens per layer.
        mode: `static=True` (never compiled here), budgets that differ between layers, or neither.
        disposal: what becomes of what is evicted.
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
    policy: str
    budget: int
    mode: Mode = "dynamic"
    disposal: str = "drop"
    outcome: Outcome = "not covered"
    error: float | None = None
    effect: float | None = None
    reason: str = ""


class Verdict(NamedTuple):
    """What a look at the model alone says: whether nothing is wrong, the error if one was measured, and a sentence."""

    ok: bool
    error: float | None
    text: str


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
        notes: what the model does with `DynamicCache`.
        verdicts: whether its keys can be unrotated and turned to other positions, and what few bits cost.
    """

    model: str
    dtype: str
    device: str
    tolerance: float
    noise: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def exact(self) -> tuple[Check, ...]:
        """Checks without a difference beyond rounding."""
        return tuple(check for check in self.checks if check.outcome == "exact")

    @property
    def refused(self) -> tuple[Check, ...]:
        """Checks that an error of this package stopped, which says why."""
        return tuple(check for check in self.checks if check.outcome == "refused")

    @property
    def wrong(self) -> tuple[Check, ...]:
        """Checks with a difference, or an error that nobody meant to raise."""
        return tuple(check for check in self.checks if check.outcome == "wrong")

    @property
    def not_covered(self) -> tuple[Check, ...]:
        """Checks with nothing to compare with."""
        return tuple(check for check in self.checks if check.outcome == "not covered")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. What was refused or not covered is no fault, and no promise either."""
        return not self.wrong and all(verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        counts = Counter(_shown(check.outcome) for check in self.checks)
        order = ("WRONG", "exact", "refused", "not covered")
        title = ", ".join(f"{counts[name]} {name}" for name in order if counts[name])
        title = f"{self.model}, {self.dtype} on {self.device}: {title}"
        reasons = list(dict.fromkeys(check.reason for check in self.checks if check.reason))
        if len(reasons) == 1 and all(check.error is None and check.reason for check in self.checks):
            return f"{title}\n{reasons[0]}"
        cells = [_HEAD, *(_cells(check, reasons) for check in self.checks)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        unit = f"Errors and effects are in standard deviations of the logits. Up to {self.tolerance:.1e} counts as "
        said = [*self.notes, *(verdict.text for verdict in self.verdicts), "", *table, ""]
        numbered = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
        return "\n".join([title, *said, f"{unit}rounding; {self.noise:.1e} was seen.", *numbered])


_HEAD = ("question", "attention", "calls", "heads", "mode", "budget", "policy", "outcome", "error", "effect", "")


def _shown(outcome: Outcome) -> str:
    return "WRONG" if outcome == "wrong" else outcome


def _cells(check: Check, reasons: Sequence[str]) -> tuple[str, ...]:
    numbers = ["" if number is None else f"{number:.1e}" for number in (check.error, check.effect)]
    note = f"[{reasons.index(check.reason) + 1}]" if check.reason else ""
    policy = check.policy if check.disposal == "drop" else f"{check.policy}, {check.disposal}"
    how = (check.question, check.attention, check.calls, check.heads, check.mode, str(check.budget), policy)
    return (*how, _shown(check.outcome), *numbers, note)
