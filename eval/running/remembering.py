"""What a policy makes of the queries of a shared reading is worked out once, not for every budget."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import Attention, Observe, Queries, Statistics


class Memory:
    """Statistics of one policy, by the queries that they were made of.

    Args:
        recorded: queries that stay where they are for as long as this lives; what is made of others is not kept.
    """

    def __init__(self, recorded: Iterable[Queries]) -> None:
        self._known = {queries.query.untyped_storage().data_ptr() for queries in recorded}
        self._found: dict[tuple[Any, ...], Statistics] = {}

    def observe(self, observe: Observe, statistics: Statistics, attention: Attention) -> Statistics:
        """What `observe` says, or what it said of the same queries, in a cache that was as empty before them."""
        queries = attention.queries
        if queries.untyped_storage().data_ptr() not in self._known:
            return observe(statistics, attention)
        # A view of all rows: where some are picked out, or the last of them, a copy is made.
        key = (queries.data_ptr(), queries.shape, queries.stride(), attention.key_positions.shape)
        if key not in self._found:
            self._found[key] = dict(observe(statistics, attention))
        return dict(self._found[key])

    def __deepcopy__(self, memo: Any) -> Memory:
        return self  # copies share what is known: it is only ever added to

    def attach(self, cache: PagedEvictionCache) -> None:
        """From now on the layers of this cache look here before they observe."""
        for _, layer in cache.paged_layers:
            if layer.recorder is not None:
                observer = layer.recorder.observer
                observer.observe = partial(self.observe, observer.observe)
