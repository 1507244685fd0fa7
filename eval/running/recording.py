"""A full cache that also keeps the queries of what it reads, for policies that decide by attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_paged_eviction.attention import PAGED_EVICTION, hand_over
from hf_paged_eviction.attention_rows import Logits
from hf_paged_eviction.models import is_latent_attention
from hf_paged_eviction.observed_layer import ObservedLayer
from hf_paged_eviction.observer import Queries
from hf_paged_eviction.policies import Recency
from hf_paged_eviction.table.budget import BlockBudget


class Listener(ObservedLayer):
    """Stands where the attention implementation "paged_eviction" expects a layer, and keeps what it is told.

    Args:
        layer_idx: index in the model.
        since: queries of columns before this one are not kept.
    """

    def __init__(self, layer_idx: int, since: int = 0) -> None:
        super().__init__(BlockBudget(None, 1, protected=1), Recency(), layer_idx=layer_idx)
        self.since = since
        self._told: list[Tensor] = []
        self._last: tuple[Tensor, Logits] | None = None

    @property
    def all_real(self) -> bool:
        """The model's own mask is the one that counts."""
        return False

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


class RecordingCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose full-attention layers are listened to until `stop` is called.

    The model must use the attention implementation "paged_eviction".

    Args:
        config: of the model.
        since: queries of columns before this one are not kept.
    """

    def __init__(self, config: Any, since: int = 0) -> None:
        super().__init__(config=config)
        self._listeners = {
            index: Listener(index, since) for index, layer in enumerate(self.layers) if type(layer) is DynamicLayer
        }
        self._listening = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values."""
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._listening and layer_idx in self._listeners:
            hand_over(self._listeners[layer_idx], updated[0])
        return updated

    def stop(self) -> dict[int, Queries]:
        """Keep no more queries; those of the layers that have shown any, by index."""
        self._listening = False
        found = {index: listener.queries for index, listener in self._listeners.items()}
        return {index: queries for index, queries in found.items() if queries is not None}


def shows_queries(model: Any) -> bool:
    """Whether what a model compares its queries with is what its cache holds, and whether it tells."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation == PAGED_EVICTION and not is_latent_attention(model.config)
