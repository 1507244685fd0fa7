"""The attention that each token of a window receives from later tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention.weights import Attention, far
from ...integration.feeding import feed
from ...integration.models import paged_layers
from ...queries.attention import PAGED_EVICTION
from ...queries.hook import HookedCache, QueryHook
from ...queries.observer import Queries

#: Largest size of the attention weights in memory, in bytes.
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Seen:
    """One layer after one forward.

    Attributes:
        layer_idx: index in the model.
        keys, values: `[batch, kv_heads, tokens, dim]`, as cached.
        positions: `[batch, kv_heads, tokens]`, -1 for a pad.
        future: `[batch, kv_heads, tokens]` float32, the measured target, such as `future_attention`.
        usable: `[batch, tokens]` bool, real tokens that some query saw from at least `distance` tokens later.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    future: Tensor
    usable: Tensor


Visit = Callable[[Seen], None]


def future_attention(queries: Queries, key_positions: Tensor, query_positions: Tensor, distance: int) -> Tensor:
    """The largest weight that a query at least `distance` tokens later pays to a token.

    The weights are averaged over the query heads of a group, and the largest over the queries counts, because a fact
    that is needed only once must not be lost. (The mean over queries shows what running text attends to.) Nearer
    queries are left out, because a cache does not evict the newest tokens.

    Args:
        key_positions: `[batch, kv_heads, tokens]`.
        query_positions: `[batch, q]`, -1 for a pad.

    Returns:
        `[batch, kv_heads, tokens]` float32.
    """
    rows, heads, count, _ = queries.query.shape
    size = max(1, _PIECE // (4 * rows * heads * queries.key.shape[2]))
    largest = torch.zeros(key_positions.shape, device=key_positions.device)
    for start in range(0, count, size):
        part = slice(start, start + size)
        part_positions = query_positions[:, part]
        attention = Attention(queries.query[:, :, part], queries.key, part_positions, key_positions, queries.logits)
        largest = torch.maximum(largest, far(attention, distance).amax(2))
    return largest


class _Watcher(QueryHook):
    """Tells of keys, values and queries of a forward.

    Args:
        layer_idx: index in the model.
        positions: `[batch, tokens]`, -1 for a pad.
        distance: see `future_attention`.
        visit: is told.
    """

    def __init__(self, layer_idx: int, positions: Tensor, distance: int, visit: Visit) -> None:
        super().__init__(layer_idx)
        self._positions, self._distance, self._visit = positions, distance, visit
        self.layer: Any = None

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        keys, values, query_positions = self.layer.keys, self.layer.values, self._positions
        positions = query_positions[:, None].expand(-1, keys.shape[1], -1)
        future = future_attention(queries, positions, query_positions, self._distance)
        usable = (query_positions >= 0) & (query_positions <= query_positions.amax(-1, keepdim=True) - self._distance)
        self._visit(Seen(self.layer_idx, keys, values, positions, future, usable))


def watch(model: Any, tokens: Tensor, mask: Tensor | None, distance: int, visit: Visit) -> None:
    """Let the model read windows `[rows, tokens]` of text, and call `visit` for each layer.

    Args:
        model: model with the attention implementation "paged_eviction".
        mask: `[rows, tokens]`, 0 for pads on the left; None = no pads.
        distance: see `future_attention`.
    """
    real = torch.ones_like(tokens) if mask is None else mask
    places = (real.cumsum(-1) - 1).masked_fill(real == 0, -1)
    paged = paged_layers(model.config)
    watchers = {index: _Watcher(index, places, distance, visit) for index in paged}
    cache = HookedCache(model.config, watchers)
    for index, watcher in watchers.items():
        watcher.layer = cache.layers[index]
    with torch.inference_mode():
        feed(model, tokens, mask, cache)


def shows_queries(model: Any) -> bool:
    """Whether the model uses the attention implementation that `watch` needs."""
    name: str | None = model.config.get_text_config(decoder=True)._attn_implementation
    return name == PAGED_EVICTION
