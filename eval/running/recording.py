"""A full cache that also keeps the queries of what it reads, for policies that decide by attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_paged_eviction.internals import PAGED_EVICTION, HookedCache, Logits, Queries, QueryHook, is_latent_attention


class QueryKeeper(QueryHook):
    """Keeps what it is told.

    Args:
        layer_idx: index in the model.
        since: queries of columns before this one are not kept.
    """

    def __init__(self, layer_idx: int, since: int = 0) -> None:
        super().__init__(layer_idx)
        self.since = since
        self._told: list[Tensor] = []
        self._last: tuple[Tensor, Logits] | None = None

    def attended(self, queries: Queries) -> None:
        """Keep the queries of one forward."""
        count, columns = queries.query.shape[2], queries.key.shape[2]
        old = min(max(self.since - (columns - count), 0), count)
        if count > old:
            self._told.append(queries.query[:, :, old:])
        self._last = queries.key, queries.logits

    @property
    def queries(self) -> Queries | None:
        """All that was kept, `[rows, query_heads, columns - since, dim]`, and the keys of the last forward."""
        if self._last is None or not self._told:
            return None
        whole = self._told[0] if len(self._told) == 1 else torch.cat(self._told, dim=2)
        return Queries(whole, *self._last)


class RecordingCache(HookedCache):
    """A `DynamicCache` whose full-attention layers are listened to until `stop` is called.

    The model must use the attention implementation "paged_eviction".

    Args:
        config: of the model.
        since: queries of columns before this one are not kept.
    """

    def __init__(self, config: Any, since: int = 0) -> None:
        layers = DynamicCache(config=config).layers
        full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self._keepers = {index: QueryKeeper(index, since) for index in full}
        super().__init__(config, self._keepers)

    def stop(self) -> dict[int, Queries]:
        """Keep no more queries; those of the layers that have shown any, by index."""
        self.hooks.clear()
        recorded = {index: keeper.queries for index, keeper in self._keepers.items()}
        return {index: queries for index, queries in recorded.items() if queries is not None}


def shows_queries(model: Any) -> bool:
    """Whether what a model compares its queries with is what its cache holds, and whether it tells."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation == PAGED_EVICTION and not is_latent_attention(model.config)
