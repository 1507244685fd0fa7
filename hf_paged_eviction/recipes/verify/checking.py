"""`verify`: the promises of the cache, put to the test on one model."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...disposals import Disposal, Drop, Recall, make_disposal
from ...policies import EvictionPolicy, make_policy
from ...policies.needs import Heads
from ...queries.attention import PAGED_EVICTION
from ...table.budget import BlockBudget
from .looks import look
from .report import CallNames, Check, Mode, Question, Verification
from .session import Session
from .subject import Subject, untouched
from .text import BLOCK_SIZE, text_length

BUDGET = 20
_CALLS: tuple[CallNames, ...] = ("one forward", "chunks", "steps")
_HEADS: tuple[Heads, ...] = ("shared", "separate")
_ALL: tuple[Question, ...] = ("same as DynamicCache", "exact for what it holds", "row as alone")
#: What is asked of one forward, and of other calls.
_ASKED: dict[Mode, tuple[tuple[Question, ...], tuple[Question, ...]]] = {
    "dynamic": (_ALL, _ALL),
    "static": (_ALL, _ALL[1:2]),
    "unequal budgets": (_ALL[1:], _ALL[1:2]),
}


def verify(
    model: Any,
    *,
    budget: int = BUDGET,
    policy: str | EvictionPolicy | None = None,
    disposal: str | Disposal = "drop",
    seed: int = 0,
    thorough: bool = True,
    text: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Run a model with this cache and with `DynamicCache` on random tokens, and compare the logits.

    Three questions, each with the prompt in one forward, in chunks and in steps, under the model's own attention
    implementation and under "paged_eviction", with shared and separate heads, dynamic and static (not compiled), with
    equal budgets and with one for each layer, in a left-padded batch:

    - *same as DynamicCache*: with a budget that holds everything;
    - *exact for what it holds*: with a small one, against a full cache whose evicted positions are masked, per layer
      and head, in the model's own eager attention. Budget and protected blocks are looked at as well;
    - *row as alone*: a row of the batch against the same row without the others and without its pads.

    With `disposal="recall"` evicted tokens come back, so there is no masked cache to compare with. Asked is whether a
    budget that holds everything gives what `DynamicCache` gives and, where each query brings back all blocks
    (`recall(blocks=all)`), whether the small one does. Other disposals change the output on purpose and are refused.

    A difference of a logit is given in standard deviations of the logits. What counts as rounding: 1e-4 in float32
    (four units in the last place in half precision), or four times what the same model differs from itself between
    two attention implementations and between a batch and its longest row alone. What the model itself makes of chunks
    or pads, with `DynamicCache`, is measured first, and nothing is compared that it cannot do.

    Besides, the rotation (rotary embedding) of its keys is undone, as some policies do; keys are turned to other
    positions, as `positions="cache"` does; and what `bits=` would cost is measured. Each gives a line.

    The model is left as it was, also after an error. A small model takes a second or two on a CPU.

    Args:
        model: a transformers model with its weights, on any devices, in any precision.
        budget: tokens of the small budget, a multiple of 4, at least 16.
        policy: what evicts, "h2o" if None; where queries are not shown to one that needs them, "random" does.
        disposal: what becomes of evicted tokens: "drop" or "recall", with parameters.
        seed: of the tokens.
        thorough: every value of every setting under each question. Otherwise the few checks that find most.
        text: `[1, n]` int64, ids of a text of more than 32 tokens on which few bits are measured, then layer by layer
            too; random tokens if None.
        progress: called with the number of checks that are done and their total.

    Raises:
        ValueError, TypeError: budget, policy or disposal cannot be used, or the model has no token embeddings. What
            goes wrong in a model is part of the result.
    """
    model = getattr(model, "_orig_mod", model)  # compiled: every kind of call would be compiled anew
    BlockBudget.validate(budget, BLOCK_SIZE, None)
    if budget < 4 * BLOCK_SIZE:
        raise ValueError(f"budget={budget} leaves nothing to choose from: at least {4 * BLOCK_SIZE}.")
    if text is not None and (text.ndim != 2 or text.shape[0] != 1 or text.shape[1] <= 32):
        raise ValueError(f"text= is [1, n] with more than 32 tokens, got {tuple(text.shape)}.")
    leaving, subject = _checked(disposal, policy), Subject(model)
    scorer = make_policy(policy or ("random" if isinstance(leaving, Recall) else "h2o"))
    plan = make_plan(subject.attention, scorer, leaving, budget)
    if not thorough:
        ways = ("one forward", subject.attention), ("chunks", PAGED_EVICTION)
        plan = [check for check in plan if check.mode == "dynamic" and (check.calls, check.attention) in ways]
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = look(model, seed, text)  # before its attention implementation is changed
        session = Session(subject, budget, seed, scorer)
        checks: list[Check] = []
        for check in plan:
            if progress is not None:
                progress(len(checks), len(plan))
            checks.append(session.answer(check))
        if progress is not None:
            progress(len(checks), len(plan))
        return session.report(tuple(checks), verdicts)


def _checked(disposal: str | Disposal, policy: str | EvictionPolicy | None) -> Disposal:
    """The disposal, if it promises an output that something else gives."""
    leaving = make_disposal(disposal)
    if not isinstance(leaving, (Drop, Recall)):
        raise ValueError(
            f"disposal={leaving.label!r}: what it keeps of evicted tokens changes the output on purpose, so there is "
            "nothing to compare with. Use 'drop', or 'recall(blocks=all)'."
        )
    if isinstance(leaving, Recall) and policy is not None and make_policy(policy).needs.queries:
        raise ValueError(
            f"policy={policy!r}: recall asks the queries itself and takes no policy that does. Use one that reads keys "
            "and values, such as 'keydiff'."
        )
    return leaving


def make_plan(own: str, scorer: EvictionPolicy, leaving: Disposal, budget: int) -> list[Check]:
    """All checks, not yet answered; heads alternate, so that both meet every value of the rest.

    Args:
        own: the model's attention implementation.
    """
    plan: list[Check] = []
    if isinstance(leaving, Recall):
        for size in (text_length(budget), budget)[: 2 if leaving.blocks == "all" else 1]:
            cases = [(calls, heads) for calls in _CALLS for heads in _HEADS]
            plan += [
                Check("same as DynamicCache", PAGED_EVICTION, calls, heads, scorer.label, size, disposal=leaving.label)
                for calls, heads in cases
            ]
        return plan
    for turn, attention in enumerate(dict.fromkeys((own, PAGED_EVICTION))):
        policy = "random" if scorer.needs.queries and attention != PAGED_EVICTION else scorer.label
        for other, (mode, asked) in enumerate(_ASKED.items()):
            if mode == "unequal budgets" and attention != PAGED_EVICTION:
                continue
            for at, calls in enumerate(_CALLS):
                for question in asked[at > 0]:
                    size = text_length(budget) if question == "same as DynamicCache" else budget
                    heads = _HEADS[(turn + other + at) % 2]
                    plan.append(Check(question, attention, calls, heads, policy, size, mode))
    return plan
