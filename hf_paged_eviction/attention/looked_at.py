"""Which tokens a later query pays a weight of some size, without the weights of all others."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..tensors.pieces import per_piece
from .weights import Attention, far

#: Keys that are compared at once: their products with all queries stay in a processor's cache.
_TOGETHER = 256
#: Logarithms of one weight, from sums in another order, differ by less.
_NOISE = 1e-3


def looked_at(attention: Attention, threshold: float, distance: int) -> Tensor:
    """Bool `[batch, kv_heads, tokens]`: a query at least `distance` tokens later pays the token a weight of
    `threshold` or more, averaged over the query heads that share the KV head."""
    shape = attention.key_positions.shape
    if attention.lse is None or threshold == 0 or attention.keys.shape[1] != shape[1]:
        return _by_weights(attention, threshold, distance)
    looked = torch.zeros(shape, dtype=torch.bool, device=attention.keys.device)
    for row in range(shape[0]):
        for head in range(shape[1]):
            _mark(looked[row, head], attention, attention.lse, (row, head), threshold, distance)
    return looked


def _by_weights(attention: Attention, threshold: float, distance: int) -> Tensor:
    """The same from all weights, which are computed in pieces."""
    rows, heads, _, _ = attention.queries.shape
    size = per_piece(attention.keys.device, rows * heads * attention.keys.shape[2])
    looked = torch.zeros(attention.key_positions.shape, dtype=torch.bool, device=attention.keys.device)
    pieces = zip(attention.queries.split(size, 2), attention.query_positions.split(size, 1), strict=True)
    for queries, positions in pieces:
        piece = replace(attention, queries=queries, query_positions=positions)
        weights = far(piece, distance) * piece.counts[:, None, :, None]
        looked |= weights.amax(2) >= threshold
    return looked


def _mark(
    looked: Tensor, attention: Attention, lse: Tensor, place: tuple[int, int], threshold: float, distance: int
) -> None:
    """Set `[tokens]` of the row and KV head at `place`.

    A mean is no larger than its largest part: only what one query head alone pays so much can be looked at, and that
    is little.
    """
    (row, head), scaling, asked = place, attention.logits.scaling, attention.query_positions[place[0]]
    keys, positions = attention.keys[place], attention.key_positions[place]
    group = attention.queries.shape[1] // attention.keys.shape[1]
    of_group = slice(head * group, (head + 1) * group)
    queries, below = attention.queries[row, of_group].flatten(0, 1), -lse[row, of_group].reshape(1, -1, 1)

    def logarithms(some: Tensor) -> Tensor:  # of weights, [1, G q, n]
        if some.dtype == torch.float32:
            return torch.baddbmm(below, queries[None], some.mT[None], alpha=scaling)
        return torch.add(below, (queries @ some.mT)[None].float(), alpha=scaling)

    most = torch.cat([logarithms(some).amax(1)[0] for some in keys.split(_TOGETHER)])
    chosen = most >= math.log(threshold) - _NOISE
    chosen &= (positions >= 0) & (positions <= asked.amax() - distance)
    for slots in chosen.nonzero()[:, 0].split(_TOGETHER):
        weights = logarithms(keys[slots])[0].exp_().view(group, len(asked), len(slots)).mean(0)
        away = (asked[:, None] - positions[slots] >= distance) & (asked >= 0)[:, None]
        looked[slots] = ((weights >= threshold) & away).any(0)
