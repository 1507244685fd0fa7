"""Record a model while it reads a text once, and replay the text for many caches."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..attention.weights import Logits
from ..cache import PagedEvictionCache
from ..integration.feeding import feed
from ..integration.models import paged_layers
from ..queries.hook import HookedCache, QueryHook
from ..queries.observer import Queries


@dataclass(frozen=True)
class LayerRecord:
    """The record of one layer.

    Attributes:
        keys, values: `[1, kv_heads, tokens, dim]`, as they came.
        query: `[1, query_heads, tokens, dim]`.
        logits: scaling, soft-capping and sinks.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    logits: Logits


class _Recorder(QueryHook):
    """Records one layer, after what was recorded of the text before."""

    def __init__(self, layer_idx: int, record: LayerRecord | None) -> None:
        super().__init__(layer_idx)
        self.record = record
        self.came: tuple[Tensor, ...] = ()

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        states, past = (*self.came, queries.query), self.record
        if past is not None:
            pairs = zip((past.keys, past.values, past.query), states, strict=True)
            states = tuple(torch.cat(pair, dim=2) for pair in pairs)
        keys, values, query = states
        self.record = LayerRecord(keys, values, query, queries.logits)


class _RecordingCache(HookedCache):
    """A `HookedCache` that shows its recorders keys and values as they come: a layer with a window keeps the last."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `HookedCache.update`."""
        recorder = self.hooks.get(layer_idx)
        if isinstance(recorder, _Recorder):
            recorder.came = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Recording:
    """A text that the whole model has read once.

    Attributes:
        ids: `[1, tokens]`.
        cache: the full cache, after the text.
        layers: records by index in the model; None if layers hold more than keys and values, so that each cache has to
            read the text itself.

    Args:
        model: with the attention implementation "paged_eviction".
        ids: `[1, new]`, the tokens to read; the attribute also has those of `before`.
        before: recording of the text before; None = none.
    """

    def __init__(self, model: Any, ids: Tensor, before: "Recording | None" = None) -> None:
        self._model = model
        past = {} if before is None else before.layers or {}
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        recorders = {index: _Recorder(index, past.get(index)) for index in range(count)}
        self.ids: Tensor = ids if before is None else torch.cat([before.ids, ids], dim=1)
        self.cache: HookedCache = _RecordingCache(model.config, {}) if before is None else copy.deepcopy(before.cache)
        self.cache.hooks.update(recorders)
        feed(model, ids, None, self.cache)
        self.cache.hooks.clear()
        records = {index: one.record for index, one in recorders.items() if one.came and one.record is not None}
        plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.cache.layers)
        whole = plain and len(records) == len(self.cache.layers)
        self.layers: dict[int, LayerRecord] | None = records if whole else None

    @property
    def token(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of a token in 16 bits, see `TokenStates`."""
        held = {index: self.cache.layers[index] for index in paged_layers(self._model.config)}
        return {
            index: (layer.keys[:, :, :1].to(torch.bfloat16), layer.values[:, :, :1].to(torch.bfloat16))
            for index, layer in held.items()
        }

    def play(self, cache: PagedEvictionCache) -> None:
        """Feed the text to an empty cache, as if the model had read it."""
        if self.layers is None:
            feed(self._model, self.ids, None, cache)
            return
        paged = dict(cache.paged_layers)
        for index, record in self.layers.items():
            cache.get_mask_sizes(self.ids.shape[1], index)
            keys, _ = cache.update(record.keys, record.values, index)
            layer = paged.get(index)
            if layer is not None and layer.waits:
                layer.attended(Queries(record.query, keys, record.logits))
