"""The result of `verify`."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from hf_paged_eviction.internals import Heads

Question = Literal["same as DynamicCache", "exact for what it holds", "row as alone"]
CallNames = Literal["one forward", "chunks", "steps"]
Mode = Literal["dynamic", "static", "unequal budgets"]
Outcome = Literal["exact", "refused", "wrong", "not covered"]
_OUTCOMES: tuple[Outcome, ...] = ("wrong", "exact", "refused", "not covered")


@dataclass(frozen=True)
class Check:
    """One comparison of this cache with something that is known to be right.

    Attributes:
        question: the promise that was checked.
        attention: the attention implementation that this cache ran under.
        calls: how the text was fed: the prompt in one forward and a few tokens, in chunks of several tokens, or token
            by token after a short beginning.
        heads: one decision for all KV heads of a layer, or one for each.
        budget: tokens per layer.
        mode: `static=True` (never compiled here), budgets that differ between layers (and between heads, if separate),
            or none of these.
        outcome: "exact"; "refused", by an error of this package that says why; "wrong"; "not covered", where there
            is nothing to compare with.
        error: largest difference of a logit, in standard deviations of the logits; None where none was measured.
        effect: how much evictions change the logits, in the same unit: what an error has to be compared with. None
            where it was not measured.
        reason: why the outcome is not "exact"; may be empty.
    """

    question: Question
    attention: str
    calls: CallNames
    heads: Heads
    budget: int
    mode: Mode = "dynamic"
    outcome: Outcome = "not covered"
    error: float | None = None
    effect: float | None = None
    reason: str = ""

    @property
    def policy(self) -> str:
        """What evicts: "h2o" under one question where the model shows its queries, otherwise "random"."""
        reads_queries = self.attention == "paged_eviction" and self.mode in ("dynamic", "unequal budgets")
        return "h2o" if reads_queries and self.question == "exact for what it holds" else "random"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; as text, a table.

    Attributes:
        model: name of the model's class.
        dtype: dtype of its weights.
        device: device of its first weights.
        tolerance: largest `Check.error` that counts as rounding.
        noise: largest change of a logit that rounding alone caused, in standard deviations of the logits.
        checks: one for each line of the table.
        notes: properties of the model that were observed with `DynamicCache`.
    """

    model: str
    dtype: str
    device: str
    tolerance: float
    noise: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    def of(self, outcome: Outcome) -> tuple[Check, ...]:
        """The checks with this outcome."""
        return tuple(check for check in self.checks if check.outcome == outcome)

    @property
    def ok(self) -> bool:
        """Whether no check is wrong. A check that was refused or not covered is no fault, and no promise either."""
        return not self.of("wrong")

    def __str__(self) -> str:
        counts = Counter(check.outcome for check in self.checks)
        title = ", ".join(f"{counts[name]} {_shown(name)}" for name in _OUTCOMES if counts[name])
        title = f"{self.model}, {self.dtype} on {self.device}: {title}"
        measured = [check for check in self.checks if check.outcome in ("exact", "wrong")]
        others = self._without_numbers(bool(measured))
        if not measured:
            return "\n".join([title, *self.notes, *others])
        reasons = list(dict.fromkeys(check.reason for check in measured if check.reason))
        cells: list[tuple[str, ...]] = [_HEAD]
        for check in measured:
            numbers = ["" if number is None else f"{number:.1e}" for number in (check.error, check.effect)]
            note = f"[{reasons.index(check.reason) + 1}]" if check.reason else ""
            how = (check.question, check.attention, check.calls, check.heads, check.mode, str(check.budget))
            cells.append((*how, check.policy, _shown(check.outcome), *numbers, note))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        unit = f"Errors and effects are in standard deviations of the logits. Up to {self.tolerance:.1e} counts as "
        numbered = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
        noise = f"{unit}rounding; {self.noise:.1e} was seen."
        return "\n".join([title, *self.notes, "", *table, "", noise, *numbered, *others])

    def _without_numbers(self, among_others: bool) -> list[str]:
        """A line for each reason why there is nothing to compare; with what it is about, if there are also numbers."""
        groups: dict[tuple[Outcome, str], list[Check]] = {}
        for check in (*self.of("refused"), *self.of("not covered")):
            groups.setdefault((check.outcome, check.reason), []).append(check)
        lines = []
        for (outcome, reason), checks in groups.items():
            about = dict.fromkeys(f"{check.question} ({check.attention}, {check.mode})" for check in checks)
            what = f", {', '.join(about)}" if among_others else ""
            lines.append(f"{len(checks)} {outcome}{what}: {reason}" if reason else f"{len(checks)} {outcome}{what}")
        return lines


_HEAD = ("question", "attention", "calls", "heads", "mode", "budget", "policy", "outcome", "error", "effect", "")


def _shown(outcome: Outcome) -> str:
    return "WRONG" if outcome == "wrong" else outcome
