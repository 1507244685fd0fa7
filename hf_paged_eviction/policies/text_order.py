"""Neighbours in the text: slots are in no particular order."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

#: How a token's neighbours are joined with it.
Pooling = Literal["avg", "max"]


def pool(values: Tensor, positions: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """Pool values that are not negative with those of the nearest held tokens; beyond the ends are zeros.

    Args:
        values: `[batch, kv_heads, tokens]`, zero at pads.
        positions: same shape.
        kernel: tokens joined, odd.
        pooling: "avg" or "max".
    """
    shared = positions[:, :1] if positions.stride(1) == 0 else positions  # one order for all heads
    # Pads come first and are zeros, as is what lies before the first token.
    order = shared.argsort(dim=-1).expand_as(positions)
    ordered = values.gather(-1, order)
    reduce = avg_pool1d if pooling == "avg" else max_pool1d
    pooled: Tensor = reduce(ordered, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(values).scatter(-1, order, pooled)


def best_first(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Slots from the highest value to the lowest, and each slot's place in that order.

    Of equal values the latest in the text comes first. Shapes as in `pool`.
    """
    order = positions.argsort(dim=-1, descending=True)
    order = order.gather(-1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    places = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return order, torch.zeros_like(order).scatter(-1, order, places)
