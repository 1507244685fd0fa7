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
        keys, values: `[1, kv_heads, tokens, dim]`.
        query: `[1, query_heads, tokens, dim]`.
        logits: scaling, soft-capping and sinks.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    logits: Logits

    def first(self, count: int) -> "LayerRecord":
        """The record of the first `count` tokens."""
        return LayerRecord(self.keys[:, :, :count], self.values[:, :, :count], self.query[:, :, :count], self.logits)


class _Recorder(QueryHook):
    """Notes what came in one forward."""

    keys: Tensor
    values: Tensor
    query: Tensor | None = None
    logits: Logits | None = None

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        self.query, self.logits = queries.query, queries.logits


class _RecordingCache(HookedCache):
    """An `HookedCache` whose recorders note keys and values as they came."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `HookedCache.update`."""
        recorder = self.hooks.get(layer_idx)
        if isinstance(recorder, _Recorder):
            recorder.keys, recorder.values = key_states, value_states
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
        if before is None:
            self.ids = ids
            self.cache = _RecordingCache(model.config, {index: _Recorder(index) for index in range(_layers(model))})
        else:
            self.ids = torch.cat([before.ids, ids], dim=1)
            self.cache = copy.deepcopy(before.cache)
        feed(model, ids, None, self.cache)
        self.layers = self._recorded(before)

    def _recorded(self, before: "Recording | None") -> dict[int, LayerRecord] | None:
        records = {}
        for index, layer in enumerate(self.cache.layers):
            recorder = self.cache.hooks.get(index)
            plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            if not plain or not isinstance(recorder, _Recorder) or recorder.query is None or recorder.logits is None:
                return None
            past = None if before is None or before.layers is None else before.layers[index]
            keys, values, query = recorder.keys, recorder.values, recorder.query
            if past is not None:
                news = (past.keys, keys), (past.values, values), (past.query, query)
                keys, values, query = (torch.cat(pair, dim=2) for pair in news)
            records[index] = LayerRecord(keys, values, query, recorder.logits)
        return records

    @property
    def token(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of a token in 16 bits, see `TokenStates`."""
        held = {index: self.cache.layers[index] for index in paged_layers(self._model.config)}
        return {
            index: (layer.keys[:, :, :1].to(torch.bfloat16), layer.values[:, :, :1].to(torch.bfloat16))
            for index, layer in held.items()
        }

    def play(self, cache: PagedEvictionCache, count: int | None = None) -> None:
        """Feed the first `count` tokens, or all, to an empty cache, as if the model had read them."""
        count = self.ids.shape[1] if count is None else count
        if self.layers is None:
            feed(self._model, self.ids[:, :count], None, cache)
            return
        paged = dict(cache.paged_layers)
        for index, record in self.layers.items():
            cache.get_mask_sizes(count, index)
            part = record.first(count)
            keys, _ = cache.update(part.keys, part.values, index)
            layer = paged.get(index)
            if layer is not None and layer.waits:
                layer.attended(Queries(part.query, keys, part.logits))


def _layers(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)
