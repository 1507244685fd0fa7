"""Contexts without a prefill: random keys and values, layer by layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import cache_kwargs

#: Tokens per update of a cache that evicts: its peak is the budget and one chunk.
_CHUNK = 1024


class LayerShape(NamedTuple):
    """`[heads, width]` of what a layer caches."""

    heads: int
    key_width: int
    value_width: int


@torch.no_grad()
def layer_shapes(model: Any) -> dict[int, LayerShape]:
    """What each layer of a model caches, seen in a forward of one token; without layers that cache no keys."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True, **cache_kwargs(model, cache))
    shapes = {}
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4:
            shapes[index] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
    return shapes


@torch.no_grad()
def fill(cache: Any, shapes: dict[int, LayerShape], rows: int, tokens: int, model: Any) -> None:
    """Feed random keys and values to every layer."""
    chunk = _CHUNK if isinstance(cache, PagedEvictionCache) else max(tokens, 1)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        if isinstance(cache, PagedEvictionCache):
            cache.get_mask_sizes(count, 0)  # as a forward does
        for index, shape in shapes.items():
            sizes = ((rows, shape.heads, count, width) for width in (shape.key_width, shape.value_width))
            keys, values = (torch.randn(size, dtype=model.dtype, device=model.device) for size in sizes)
            cache.update(keys, values, index)
