"""One compressed cache of a text that never lies in memory as a whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import PagedLayer, feed, feed_probe, shrink_layer

from .layer_tokens import LayerTokens


@torch.no_grad()
def read_compressed(
    model: Any,
    ids: Tensor,
    probe: Tensor,
    shares: Sequence[int],
    chunk_size: int,
    settings: Mapping[str, Any],
) -> PagedEvictionCache:
    """Read a text in blocks; after each keep what the probe attends to most.

    At no time are more than a layer's share and `chunk_size` tokens held.

    Args:
        ids: `[1, n]`, the text.
        probe: `[1, m]`, fed after each block and taken back.
        shares: tokens that each paged layer holds in the end.
        chunk_size: tokens of a block, a multiple of the cache's `block_size`.
        settings: further arguments of the cache.
    """
    allocator: str | LayerTokens = "uniform" if len(set(shares)) == 1 else LayerTokens(tuple(shares))
    cache = PagedEvictionCache(model.config, sum(shares) // len(shares), allocator=allocator, **settings)
    layers = [layer for _, layer in cache.paged_layers]
    for start in range(0, ids.shape[1], chunk_size):
        _give_room(layers, shares, chunk_size)
        feed(model, ids[:, start : start + chunk_size], None, cache)
        if any(layer.held > share for layer, share in zip(layers, shares, strict=True)):
            for layer in layers:
                layer.forget_attention()
            feed_probe(model, cache, probe, None)
            _give_room(layers, shares, 0)
    _give_room(layers, shares, 0)
    return cache


def _give_room(layers: Sequence[PagedLayer], shares: Sequence[int], more: int) -> None:
    """Let each layer hold its share and so many more tokens: what is above goes now."""
    for layer, share in zip(layers, shares, strict=True):
        layer.state.budget.give(layer.budget.of(share + more))
        shrink_layer(layer.state)
