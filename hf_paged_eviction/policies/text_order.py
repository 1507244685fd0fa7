"""Pool values and sort tokens by their positions in the text, because slots are in no particular order."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ..ranking import rank_keys

#: Ways to pool a token with its neighbours.
Pooling = Literal["avg", "max"]


def pool(values: Tensor, positions: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """Pool values, which must not be negative, with those of the nearest held tokens, padded with zeros.

    Args:
        values: `[batch, kv_heads, tokens]`, zero at pads.
        positions: same shape.
        kernel: number of tokens that are pooled, odd.
        pooling: "avg" or "max".
    """
    shared = positions[:, :1] if positions.stride(1) == 0 else positions  # all heads have the same order
    # Pads come first and are zeros, as is what lies before the first token.
    order = shared.argsort(dim=-1).expand_as(positions)
    ordered = values.gather(-1, order)
    reduce = avg_pool1d if pooling == "avg" else max_pool1d
    pooled: Tensor = reduce(ordered, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(values).scatter(-1, order, pooled)


def best_first(values: Tensor, positions: Tensor, absolute_noise: bool = False) -> tuple[Tensor, Tensor]:
    """Sort slots from the highest value to the lowest; returns the slots, and the place of each slot. Pads come last.

    Of values that differ only by noise (see `rank_keys`), the latest in the text comes first. Shapes as in `pool`.
    """
    order = rank_keys(values, positions, positions >= 0, absolute_noise).argsort(dim=-1, descending=True)
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return order, torch.zeros_like(order).scatter(-1, order, places)
