"""A full cache that also keeps the queries of what it reads, for policies that decide by attention, and what these make
of them: worked out once, not for every budget."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import (
    PAGED_EVICTION,
    Attention,
    HookedCache,
    Logits,
    Observe,
    Queries,
    QueryHook,
    Statistics,
    is_latent_attention,
)


class QueryKeeper(QueryHook):
    """Keeps the queries of all forwards of a layer, whose index in the model it gets."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self._told: list[Tensor] = []
        self._last: tuple[Tensor, Logits] | None = None

    def attended(self, queries: Queries) -> None:
        """Keep the queries of one forward."""
        self._told.append(queries.query)
        self._last = queries.key, queries.logits

    @property
    def queries(self) -> Queries | None:
        """All that was kept, `[rows, query_heads, columns, dim]`, and the keys of the last forward."""
        if self._last is None or not self._told:
            return None
        whole = self._told[0] if len(self._told) == 1 else torch.cat(self._told, dim=2)
        return Queries(whole, *self._last)


class RecordingCache(HookedCache):
    """A `DynamicCache` that keeps the queries of its full-attention layers until `stop` is called.

    The model must use the attention implementation "paged_eviction".
    """

    def __init__(self, config: Any) -> None:
        layers = DynamicCache(config=config).layers
        full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self._keepers = {index: QueryKeeper(index) for index in full}
        super().__init__(config, self._keepers)

    def stop(self) -> dict[int, Queries]:
        """Keep no more queries; those of the layers that have shown any, by index."""
        self.hooks.clear()
        recorded = {index: keeper.queries for index, keeper in self._keepers.items()}
        return {index: queries for index, queries in recorded.items() if queries is not None}


class Memory:
    """Statistics of one policy, by the queries that they were made of.

    Args:
        recorded: queries whose memory stays in place as long as this object lives. Statistics of other queries are not
            kept.
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


def shows_queries(model: Any) -> bool:
    """Whether what a model compares its queries with is what its cache holds, and whether it tells."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation == PAGED_EVICTION and not is_latent_attention(model.config)
