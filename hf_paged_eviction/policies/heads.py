"""Means over KV heads."""

import torch
from torch import Tensor

from .base import ScoreContext


def mean_over_heads(values: Tensor, context: ScoreContext) -> Tensor:
    """Give each token the mean of its values over the KV heads that hold it.

    Args:
        values: `[batch, kv_heads, tokens]`.
        context: the tokens of these values; heads may hold different tokens, or the same in another order.
    """
    positions, everywhere = context.positions, context.all_heads(values)
    if positions.stride(1) == 0:  # all heads see the same tokens
        return everywhere.mean(1, keepdim=True).expand_as(values)
    ordered, order = context.all_heads(positions).sort(dim=-1)
    wanted = positions.flatten(1)
    total, holders = torch.zeros_like(values), torch.zeros_like(values)
    for head in range(everywhere.shape[1]):
        place = torch.searchsorted(ordered[:, head].contiguous(), wanted).clamp_max(positions.shape[-1] - 1)
        is_held = (ordered[:, head].gather(1, place) == wanted).view_as(values)
        of_head = everywhere[:, head].gather(1, order[:, head].gather(1, place)).view_as(values)
        total = total + of_head.where(is_held, 0.0)
        holders = holders + is_held
    return total / holders
