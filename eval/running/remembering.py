"""What a policy makes of the queries of a shared reading is worked out once, not for every budget."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from hf_paged_eviction import EvictionPolicy
from hf_paged_eviction.policies import Statistics
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction.queries.weights import Attention


class Memory:
    """Statistics of one policy, by the queries that they were made of.

    Args:
        known: queries that stay where they are for as long as this lives; what is made of others is not kept.
    """

    def __init__(self, known: Iterable[Queries]) -> None:
        self._known = {queries.query.untyped_storage().data_ptr() for queries in known}
        self._found: dict[tuple[Any, ...], Statistics] = {}

    def observe(self, policy: EvictionPolicy, statistics: Statistics, attention: Attention) -> Statistics:
        """`policy.observe`, or what it returned for the same queries, in a cache that was as empty before them."""
        queries = attention.queries
        if queries.untyped_storage().data_ptr() not in self._known:
            return policy.observe(statistics, attention)
        # A view of all rows: where some are picked out, or the last of them, a copy is made.
        key = (queries.data_ptr(), queries.shape, queries.stride(), attention.key_positions.shape)
        if key not in self._found:
            self._found[key] = dict(policy.observe(statistics, attention))
        return dict(self._found[key])

    def __deepcopy__(self, memo: Any) -> Memory:
        return self  # never changed but for the better


def remembering(policy: EvictionPolicy, memory: Memory) -> EvictionPolicy:
    """The same policy, with a memory."""
    other = copy(policy)
    # A policy is frozen, and must look like itself in every other respect.
    object.__setattr__(other, "observe", lambda statistics, seen: memory.observe(policy, statistics, seen))
    return other
