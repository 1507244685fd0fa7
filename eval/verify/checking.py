"""`verify`: check the promises of the cache on one model."""

import warnings
from collections.abc import Callable
from typing import Any

from hf_paged_eviction.internals import PAGED_EVICTION, Heads, forget_last_text, without_parallel
from hf_paged_eviction.table.budget import BlockBudget

from .report import CallNames, Check, Mode, Question, Verification
from .session import Session
from .subject import Subject, untouched
from .text import BLOCK_SIZE, text_length

BUDGET = 20
_CALLS: tuple[CallNames, ...] = ("one forward", "chunks", "steps")
_HEADS: tuple[Heads, ...] = ("shared", "separate")
_SAME: Question = "same as DynamicCache"
_EXACT: Question = "exact for what it holds"
_ALONE: Question = "row as alone"
#: By mode: the questions for one forward, and for other calls.
_ASKED: dict[Mode, tuple[tuple[Question, ...], tuple[Question, ...]]] = {
    "dynamic": ((_SAME, _EXACT, _ALONE), (_SAME, _EXACT, _ALONE)),
    "static": ((_SAME, _EXACT, _ALONE), (_EXACT,)),
    "unequal budgets": ((_EXACT, _ALONE), (_EXACT,)),
}


def verify(
    model: Any,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    thorough: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Run a model with this cache and with `DynamicCache` on random tokens, and compare the logits.

    It asks three questions:

    - *same as DynamicCache*: a budget that holds everything changes nothing;
    - *exact for what it holds*: a small budget gives what a full cache gives when the evicted positions are masked, per
      layer and head, in the model's own eager attention. The budget and the protected blocks are checked, too;
    - *row as alone*: a row of a batch gives what it gives without the other rows and without its pads.

    Each is checked in a left-padded batch, with the prompt in one forward, in chunks and token by token, under the
    model's own attention implementation and under "paged_eviction", with shared and separate heads, with dynamic and
    static caches (not compiled), with equal budgets and with one for each layer or head (`Heads.of`).

    Differences of logits are given in standard deviations of the logits. A difference counts as rounding up to 1e-4 in
    float32 and up to four units in the last place in half precision. The limit is higher for a model that differs from
    itself: six times the difference between two attention implementations, or between a batch and its longest row. Pads
    are tried with `DynamicCache` first; what the model cannot do with it is not compared.

    The model is left as it was, also after an error. A small model takes some seconds on a CPU, and less than one
    without `thorough`.

    Args:
        model: a transformers model with its weights, on any devices, in any precision.
        budget: tokens of the small budget, a multiple of 4, at least 16.
        seed: seed of the random tokens.
        thorough: check every value of every setting under each question. False runs the few checks that find most
            errors.
        progress: called with the number of finished checks and their total.

    Raises:
        ValueError, TypeError: the budget cannot be used, or the model has no token embeddings. Errors inside the model
            are part of the result.
        RuntimeError: the cache refuses the options of a check for a plain model, too: the check is at fault.
    """
    model = without_parallel(model)
    model = getattr(model, "_orig_mod", model)  # a compiled model would be compiled again for every kind of call
    BlockBudget.validate(budget, BLOCK_SIZE, None)
    if budget < 4 * BLOCK_SIZE:
        raise ValueError(f"budget={budget} leaves nothing to choose from: at least {4 * BLOCK_SIZE}.")
    subject = Subject(model)
    plan = make_plan(subject.attention, budget)
    if not thorough:
        ways = ("one forward", subject.attention), ("chunks", PAGED_EVICTION)
        plan = [check for check in plan if check.mode == "dynamic" and (check.calls, check.attention) in ways]
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forget_last_text(model)
        session, checks = Session(subject, budget, seed), list[Check]()
        for check in plan:
            if progress is not None:
                progress(len(checks), len(plan))
            checks.append(session.answer(check))
        if progress is not None:
            progress(len(checks), len(plan))
        return session.report(tuple(checks))


def make_plan(own: str, budget: int) -> list[Check]:
    """All checks, not yet answered; heads alternate, so that both meet every value of the rest.

    Args:
        own: the model's attention implementation.
    """
    plan: list[Check] = []
    for turn, attention in enumerate(dict.fromkeys((own, PAGED_EVICTION))):
        for other, (mode, questions) in enumerate(_ASKED.items()):
            if mode == "unequal budgets" and attention != PAGED_EVICTION:
                continue
            for at, calls in enumerate(_CALLS):
                for question in questions[at > 0]:
                    size = text_length(budget) if question == _SAME else budget
                    heads = _HEADS[(turn + other + at) % 2]
                    plan.append(Check(question, attention, calls, heads, size, mode))
    return plan
