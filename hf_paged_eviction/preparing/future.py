"""The attention that each token of a window receives from later tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.weights import Attention, far
from ..integration.feeding import feed
from ..integration.models import paged_layers
from ..policies import Statistics
from ..queries.hook import HookedCache, QueryHook
from ..queries.observer import Queries, fold

#: Nearer tokens do not count, because the cache holds them anyway.
DISTANCE = 64


@dataclass(frozen=True)
class Seen:
    """One layer after a window.

    Attributes:
        layer_idx: index in the model.
        keys, values: `[rows, kv_heads, tokens, dim]`, as cached.
        positions: `[rows, kv_heads, tokens]`.
        future: `[rows, kv_heads, tokens]` float32, see `future_attention`.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    future: Tensor


def usable(values: Tensor) -> Tensor:
    """The tokens that some query saw from at least `DISTANCE` tokens later: `[rows, kv_heads, tokens, ...]` ->
    `[kv_heads, n, ...]`."""
    return values.transpose(0, 1)[:, :, :-DISTANCE].flatten(1, 2).contiguous()


#: Called with the index of a layer, the queries of a forward, and all keys and values of the layer.
Hear = Callable[[int, Queries, Tensor, Tensor], None]


def future_attention(queries: Queries, key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """The largest weight that a query at least `DISTANCE` tokens later pays to a token.

    The weights are averaged over the query heads of a group, and the largest over the queries counts, because a fact
    that is needed only once must not be lost. (The mean over queries shows what running text attends to.) Nearer
    queries are left out, because a cache does not evict the newest tokens.

    Args:
        key_positions: `[rows, kv_heads, tokens]`.
        query_positions: `[rows, q]`.

    Returns:
        `[rows, kv_heads, tokens]` float32.
    """

    def observe(statistics: Statistics, attention: Attention) -> Statistics:
        return {"largest": torch.maximum(statistics["largest"], far(attention, DISTANCE).amax(2))}

    nothing = torch.zeros(key_positions.shape, device=key_positions.device)
    return fold(observe, {"largest": nothing}, queries, key_positions, query_positions)["largest"]


class _Listener(QueryHook):
    """Tells of the queries of a layer of a `HookedCache`, and of what the layer then holds."""

    def __init__(self, layer_idx: int, layer: Any, hear: Hear) -> None:
        super().__init__(layer_idx)
        self._layer, self._hear = layer, hear

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        self._hear(self.layer_idx, queries, self._layer.keys, self._layer.values)


def overheard(model: Any, hear: Hear, layers: Iterable[int] | None = None) -> HookedCache:
    """A cache that calls `hear` for each layer after each forward.

    Args:
        model: model with the attention implementation "paged_eviction".
        layers: which layers; None = all that evict.
    """
    cache = HookedCache(model.config, {})
    indices = paged_layers(model.config) if layers is None else layers
    cache.hooks.update({index: _Listener(index, cache.layers[index], hear) for index in indices})
    return cache


@torch.no_grad()
def watch(model: Any, window: Tensor, visit: Callable[[Seen], object]) -> None:
    """Let the model read a window, and call `visit` for each layer.

    Args:
        model: model with the attention implementation "paged_eviction".
        window: `[rows, tokens]` int64.
    """
    places = torch.arange(window.shape[1], device=window.device).expand(len(window), -1)

    def hear(index: int, queries: Queries, keys: Tensor, values: Tensor) -> None:
        positions = places[:, None].expand(-1, keys.shape[1], -1)
        visit(Seen(index, keys, values, positions, future_attention(queries, positions, places)))

    feed(model, window, None, overheard(model, hear))
