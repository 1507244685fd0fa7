"""What a model looks at in a window of text while it repeats it: KVzip's score (arXiv 2505.23416) of each token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    Attention,
    HookedCache,
    Queries,
    QueryHook,
    Seen,
    Visit,
    feed,
    paged_layers,
    repeated,
)

#: Attention weights that exist at one time, in bytes.
_PIECE = 64 * 2**20


def largest_attention(queries: Queries, key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """The largest weight that any query, in any query head of a group, pays to a token: `[batch, kv_heads, tokens]`.

    Args:
        key_positions: `[batch, kv_heads, tokens]`.
        query_positions: `[batch, q]`, -1 for a pad.
    """
    rows, heads, count, _ = queries.query.shape
    size = max(1, _PIECE // (4 * rows * heads * queries.key.shape[2]))
    largest = torch.zeros(key_positions.shape, device=key_positions.device)
    for start in range(0, count, size):
        part = slice(start, start + size)
        seen = Attention(
            queries.query[:, :, part], queries.key, query_positions[:, part], key_positions, queries.logits
        )
        largest = torch.maximum(largest, seen.weights.amax((2, 3)))
    return largest


class _Repeater(QueryHook):
    """Tells what the queries of the second forward pay to the tokens of the first."""

    def __init__(self, layer_idx: int, cache: "_Repeated", visit: Visit) -> None:
        super().__init__(layer_idx)
        self._cache, self._visit = cache, visit

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        places, columns = self._cache.places, self._cache.columns
        if queries.key.shape[2] == columns:
            return  # the window itself
        layer = self._cache.layers[self.layer_idx]
        keys = places[:, None].expand(-1, layer.keys.shape[1], -1)
        scores = largest_attention(queries, keys, places[:, columns:])[..., :columns]
        read = layer.keys[:, :, :columns], layer.values[:, :, :columns], keys[..., :columns]
        self._visit(Seen(self.layer_idx, *read, scores, places[:, :columns] >= 0))


class _Repeated(HookedCache):
    """Attributes:
    places: `[rows, all tokens]`, positions, -1 for a pad.
    columns: of the window.
    """

    places: Tensor
    columns: int


def watch_repeated(
    model: Any,
    tokens: Tensor,
    mask: Tensor | None,
    probe: Sequence[int],
    visit: Visit,
    read: Callable[[], None] = lambda: None,
) -> None:
    """Let the model read windows `[rows, tokens]`, then a probe and the same again, and visit its layers one by one.

    Args:
        model: with the attention implementation "paged_eviction".
        mask: `[rows, tokens]`, 0 for pads on the left; None = no pads.
        probe: ids of what asks to repeat.
        visit: told of the tokens of the windows, `Seen.future` is the largest attention that the repetition paid.
        read: called between the two.
    """
    real = torch.ones_like(tokens) if mask is None else mask
    ids, real_probe = repeated(torch.as_tensor(probe), tokens, real)
    every = torch.cat([real, real_probe], dim=1)
    cache = _Repeated(model.config, {})
    cache.places, cache.columns = (every.cumsum(-1) - 1).masked_fill(every == 0, -1), tokens.shape[1]
    paged = paged_layers(model.config)
    cache.hooks.update({index: _Repeater(index, cache, visit) for index in paged})
    with torch.inference_mode():
        feed(model, tokens, mask, cache)
        read()
        feed(model, ids, None if mask is None else every, cache)
