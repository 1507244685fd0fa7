"""Which policies and budgets were asked for, and the attention implementation that they need."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged_eviction import available_policies, make_disposal
from hf_paged_eviction.internals import PAGED_EVICTION

from ..errors import UserError
from .budgets import FULL, Budget, parse_budgets
from .policy_names import ALL, choose_policies, needs_queries


def choose_caches(policies: str, budgets: Sequence[Budget]) -> tuple[tuple[str, ...], list[Budget]]:
    """Policies without the full cache, and budgets; "full" in either list adds the full cache, once."""
    names = choose_policies(policies)
    every = available_policies() if ALL in names else ()
    chosen = tuple(dict.fromkeys([*every, *(name for name in names if name not in (FULL, ALL))]))
    sizes = list(budgets)
    if FULL in names:
        sizes = [budget for budget in sizes if chosen and not budget.is_full] + list(parse_budgets(FULL))
    if all(budget.is_full for budget in sizes):
        chosen = ()
    return chosen, sizes


def attention_for(policies: Sequence[str], typed: str | None, disposal: str = "drop", also: str = "") -> str | None:
    """The attention implementation that these policies, the disposal or what is asked besides (`also`) need, or the one
    typed; None for the model's default.

    Raises:
        UserError: another one was typed, or there is no such disposal.
    """
    curious = [name for name in (*policies, also) if name and (name == also or needs_queries(name))]
    try:
        if policies and make_disposal(disposal).needs_queries:
            curious.append(f"--disposal {disposal}")
    except (TypeError, ValueError) as error:
        raise UserError(f"--disposal {disposal}: {error}") from error
    if curious and typed not in (None, PAGED_EVICTION):
        raise UserError(
            f"{', '.join(curious)}: needs queries, which --attn-implementation {typed} does not provide; leave that "
            f"option out, or use {PAGED_EVICTION}, which computes the same as sdpa"
        )
    return PAGED_EVICTION if curious else typed
