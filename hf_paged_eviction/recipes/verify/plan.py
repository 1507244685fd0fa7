"""Which combinations are run: every value of every setting under each question, and not their full product."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...policies.needs import Heads
from ...queries.attention import PAGED_EVICTION
from .report import Budgets, CallNames, Mode, Question

ROOMY: tuple[Question, ...] = ("same as DynamicCache",)
BINDING: tuple[Question, ...] = ("exact for what it holds",)
RETURNED: tuple[Question, ...] = ("same with what comes back",)
BOTH: tuple[Question, ...] = ("exact for what it holds", "row as alone")


@dataclass(frozen=True)
class Setting:
    """How the cache is made and fed.

    Attributes:
        attention: implementation that it runs under.
        policy: name with parameters.
    """

    attention: str
    calls: CallNames
    heads: Heads
    policy: str
    mode: Mode = "dynamic"
    budgets: Budgets = "equal"
    disposal: str = "drop"


Plan = list[tuple[tuple[Question, ...], Setting]]


def make_plan(own: str, plain: str, watching: str) -> Plan:
    """All runs, with the questions that each answers.

    Args:
        own: the model's attention implementation.
        plain: policy that reads no queries.
        watching: policy to be used where queries are shown.
    """
    plan: Plan = []
    if own != PAGED_EVICTION:
        plan += _under(own, plain, plain)
    plan += _under(PAGED_EVICTION, watching, plain)
    plan += [
        (BOTH, Setting(PAGED_EVICTION, "one forward", "shared", watching, budgets="per layer")),
        (BINDING, Setting(PAGED_EVICTION, "chunks", "separate", plain, budgets="per layer")),
        (BINDING, Setting(PAGED_EVICTION, "steps", "shared", plain, budgets="per layer")),
    ]
    return sorted(plan, key=lambda each: (_order(each[0]), each[1].budgets))


def recall_plan(policy: str, disposal: str, everything: bool) -> Plan:
    """All runs under a disposal that brings back what was evicted.

    Args:
        policy: one that reads no queries.
        everything: each query brings back all blocks, so that a small budget, too, gives what `DynamicCache` gives.
    """
    questions = (ROOMY, RETURNED) if everything else (ROOMY,)
    calls: tuple[CallNames, ...] = ("one forward", "chunks", "steps")
    return [
        ((question,), Setting(PAGED_EVICTION, call, heads, policy, disposal=disposal))
        for (question,) in questions
        for call in calls
        for heads in _HEADS
    ]


def shortened(plan: Plan) -> Plan:
    """The checks that find most: small budgets under the model's own attention, with steps after the prompt, and under
    "paged_eviction" in chunks, there with a large one, too."""
    wanted: list[tuple[bool, CallNames]] = [(True, "chunks"), (False, "one forward"), (False, "chunks")]
    found: Plan = []
    for roomy, calls in wanted:
        fitting = [
            each
            for each in plan
            if (each[0] == ROOMY, each[1].calls, each[1].mode, each[1].budgets) == (roomy, calls, "dynamic", "equal")
        ]
        found += fitting[:1] if calls == "one forward" else fitting[-1:]
    return found or plan[:3]


def _order(questions: Sequence[Question]) -> bool:
    return questions != ROOMY


def _under(attention: str, policy: str, plain: str) -> Plan:
    """With turned heads under the two implementations, so that both meet with both kinds of calls."""
    first, second = _HEADS if policy == plain else _HEADS[::-1]
    return [
        (ROOMY, Setting(attention, "one forward", first, policy)),
        (ROOMY, Setting(attention, "chunks", second, policy)),
        (ROOMY, Setting(attention, "steps", first, policy)),
        (ROOMY, Setting(attention, "one forward", second, plain, "static")),
        (BOTH, Setting(attention, "one forward", first, policy)),
        (BOTH, Setting(attention, "chunks", second, policy)),
        (BOTH, Setting(attention, "steps", first, policy)),
        (BOTH, Setting(attention, "one forward", second, policy, "static")),
        (BINDING, Setting(attention, "steps" if policy == plain else "chunks", first, plain, "static")),
    ]


_HEADS: tuple[Heads, Heads] = ("shared", "separate")
