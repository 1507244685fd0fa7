"""`verify`: the promises of the cache, put to the test on one model."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...disposals import Disposal, Drop, Recall, make_disposal
from ...policies import EvictionPolicy, make_policy
from ...table.budget import BlockBudget
from .distances import look_at_distances
from .model_state import untouched
from .plan import Plan, make_plan, recall_plan, shortened
from .precision import look_at_bits
from .report import Check, Verification
from .rotation import look_at_rotation
from .session import BLOCK_SIZE, Session
from .text import embeddings

BUDGET = 20
#: `random` goes by positions alone; `h2o` needs every query of a row, and no other.
PLAIN, WATCHING = "random", "h2o"


def verify(
    model: Any,
    *,
    budget: int | None = None,
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
    (`recall(blocks=all)`), whether the small one does (*same with what comes back*). Other disposals change the output
    on purpose and are refused.

    A difference of a logit is given in standard deviations of the logits. What counts as rounding: 1e-4 in float32
    (four units in the last place in half precision), or four times what the same model differs from itself between
    two attention implementations and between a batch and its longest row alone. What the model itself makes of chunks
    or pads, with `DynamicCache`, is measured first, and nothing is compared that it cannot do.

    Besides, the rotation (rotary embedding) of its keys is undone, as some policies do: see `Rotation`. And keys are
    turned to other positions, as `positions="cache"` does: see `Distances`. What `bits=` would cost is measured: see
    `FewBits`.

    The model is left as it was, also after an error. A small model takes a second or two on a CPU.

    Args:
        model: a transformers model with its weights, on any devices, in any precision.
        budget: tokens of the small budget, a multiple of 4, at least 16; 20 if None.
        policy: what evicts; "random", and "h2o" where queries are shown, if None.
        disposal: what becomes of evicted tokens: "drop" or "recall", with parameters.
        seed: of the tokens.
        thorough: every value of every setting under each question. Otherwise the few checks that find most, in a sixth
            of the time.
        text: `[1, n]` int64, ids of a text of more than 32 tokens on which few bits are measured, then layer by layer
            too; random tokens if None.
        progress: called with the number of checks that are done and their total.

    Raises:
        ValueError, TypeError: budget, policy or disposal cannot be used, or the model has no token embeddings. What
            goes wrong in a model is part of the result.
    """
    model = getattr(model, "_orig_mod", model)  # compiled: every kind of call would be compiled anew
    tokens = BUDGET if budget is None else budget
    BlockBudget.validate(tokens, BLOCK_SIZE, None)
    if tokens < 4 * BLOCK_SIZE:
        raise ValueError(f"budget={budget} leaves nothing to choose from: at least {4 * BLOCK_SIZE}.")
    if text is not None and (text.ndim != 2 or text.shape[0] != 1 or text.shape[1] <= 32):
        raise ValueError(f"text= is [1, n] with more than 32 tokens, got {tuple(text.shape)}.")
    policies, leaving = _policies(policy), _checked(disposal, policy)
    embeddings(model)
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Before its attention implementation is changed.
        rotation, distances, bits = look_at_rotation(model), look_at_distances(model), look_at_bits(model, seed, text)
        session = Session(model, tokens, seed, policies)
        plan = _plan(session, policies, leaving)
        if not thorough:
            plan = shortened(plan)
        total = sum(len(questions) for questions, _ in plan)
        checks: list[Check] = []
        if progress is not None:
            progress(0, total)
        for questions, setting in plan:
            for question in questions:
                checks.append(session.check(question, setting))
                if progress is not None:
                    progress(len(checks), total)
        return replace(session.report(tuple(checks)), rotation=rotation, distances=distances, few_bits=bits)


def _policies(policy: str | EvictionPolicy | None) -> tuple[EvictionPolicy, EvictionPolicy]:
    """The policy that reads no queries, and the one where they are shown."""
    if policy is None:
        return make_policy(PLAIN), make_policy(WATCHING)
    scorer = make_policy(policy)
    return (make_policy(PLAIN) if scorer.needs.queries else scorer), scorer


def _checked(disposal: str | Disposal, policy: str | EvictionPolicy | None) -> Disposal:
    """The disposal, if it promises an output that something else gives."""
    found = make_disposal(disposal)
    if not isinstance(found, (Drop, Recall)):
        raise ValueError(
            f"disposal={found.label!r}: what it keeps of evicted tokens changes the output on purpose, so there is "
            "nothing to compare with. Use 'drop', or 'recall(blocks=all)'."
        )
    if isinstance(found, Recall) and policy is not None and make_policy(policy).needs.queries:
        raise ValueError(
            f"policy={policy!r}: recall asks the queries itself and takes no policy that does. Use one that reads keys "
            "and values, such as 'keydiff'."
        )
    return found


def _plan(session: Session, policies: tuple[EvictionPolicy, EvictionPolicy], disposal: Disposal) -> Plan:
    plain, watching = (scorer.label for scorer in policies)
    if isinstance(disposal, Recall):
        return recall_plan(plain, disposal.label, disposal.blocks == "all")
    return make_plan(session.own_attention, plain, watching)
