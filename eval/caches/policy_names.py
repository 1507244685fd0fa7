"""Policies as a run names them, and what they need: those of the library, each with an allocator."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from hf_paged_eviction import available_policies, make_allocator, make_disposal, make_policy
from hf_paged_eviction.internals import AUTO, PAGED_EVICTION, Uniform, reads_profile

from ..errors import UserError
from .budgets import FULL, Budget, parse_budgets
from .spelling import split_list

#: All policies of the library.
ALL = "all"
UNIFORM = "uniform"


def split_name(name: str) -> tuple[str, str]:
    """Policy and allocator: "h2o@ada_kv(floor=0.5)" is ("h2o", "ada_kv(floor=0.5)"), "h2o" is ("h2o", "uniform"),
    "tova@heads:[[1, 2]]" is ("tova", "heads:[[1, 2]]")."""
    policy, separator, allocator = name.rpartition("@")
    return (policy, allocator) if separator else (name, UNIFORM)


def needs_queries(name: str, disposal: str = "drop") -> bool:
    """Whether a cache of such a policy and disposal works with the attention implementation "paged_eviction" only.

    "auto" counts as such: it works with any implementation, and does better with this one.

    Raises:
        ValueError: there is no such policy, allocator or disposal.
    """
    policy, allocator = split_name(name)
    equal = isinstance(make_allocator(allocator), Uniform)
    curious = policy == AUTO or make_policy(policy).needs.queries or not equal
    return make_disposal(disposal).needs_queries or curious


def choose_policies(typed: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once; "full" and "all" stay what they are.

    Raises:
        UserError: there are none, or one is no policy.
    """
    names = tuple(dict.fromkeys(split_list(typed)))
    if not names:
        raise UserError(f"no policy in {typed!r}; choose from {', '.join(_known())}")
    for name in names:
        if name not in (FULL, ALL):
            _check(name)
    return names


def one_policy(typed: str) -> str:
    """The name of the policy of a single cache, perhaps "auto".

    Raises:
        UserError: there is none, there are several, or it is none of a cache.
    """
    names = choose_policies(typed)
    if len(names) > 1 or names[0] in (FULL, ALL):
        raise UserError(f"policy {typed!r}: there is one cache, name one policy")
    return names[0]


def _check(name: str) -> None:
    try:
        needs_queries(name)
    except (TypeError, ValueError) as error:
        policy = split_name(name)[0]
        if not policy.isidentifier() or policy in _known():
            raise UserError(f"policy {name!r}: {error}") from error
        close = get_close_matches(policy, _known(), n=1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise UserError(f"unknown policy {name}{hint} choose from {', '.join(_known())}") from error


def _known() -> list[str]:
    return [*available_policies(), AUTO, FULL, ALL]


def choose_caches(policies: str, budgets: Sequence[Budget]) -> tuple[tuple[str, ...], list[Budget]]:
    """Policies without the full cache, and budgets; "full" in either list adds the full cache, once, and "all" all
    policies that read no profile."""
    names = choose_policies(policies)
    every = [name for name in available_policies() if not reads_profile(name)] if ALL in names else []
    chosen = tuple(dict.fromkeys([*every, *(name for name in names if name not in (FULL, ALL))]))
    sizes = list(budgets)
    if FULL in names:
        sizes = [budget for budget in sizes if chosen and not budget.is_full] + list(parse_budgets(FULL))
    if all(budget.is_full for budget in sizes):
        chosen = ()
    return chosen, sizes


def attention_for(policies: Sequence[str], typed: str | None, disposal: str = "drop") -> str | None:
    """The attention implementation that these policies or the disposal need, or the one typed; None for the model's
    default.

    Raises:
        UserError: another one was typed, or there is no such disposal.
    """
    curious = [name for name in policies if needs_queries(name)]
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
