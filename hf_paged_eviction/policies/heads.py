"""Numbers of the same token in several KV heads."""

import torch
from torch import Tensor

from ..integration.heads import WHOLE, HeadShare


def mean_over_heads(values: Tensor, positions: Tensor, share: HeadShare = WHOLE) -> Tensor:
    """Give each token the mean of its values over the KV heads that hold it.

    Args:
        values: `[batch, kv_heads, tokens]`.
        positions: same shape, which token a slot holds; heads may hold different tokens, or the same in another order.
        share: gathers from the heads of other processes.
    """
    everywhere = share.gather(values)
    if positions.stride(1) == 0:  # one set of tokens, shown to all heads
        return everywhere.mean(1, keepdim=True).expand_as(values)
    ordered, order = share.gather(positions).sort(dim=-1)
    wanted = positions.flatten(1)
    total, holders = torch.zeros_like(values), torch.zeros_like(values)
    for head in range(everywhere.shape[1]):
        place = torch.searchsorted(ordered[:, head].contiguous(), wanted).clamp_max(positions.shape[-1] - 1)
        found = (ordered[:, head].gather(1, place) == wanted).view_as(values)
        theirs = everywhere[:, head].gather(1, order[:, head].gather(1, place)).view_as(values)
        total = total + theirs.where(found, 0.0)
        holders = holders + found
    return total / holders
