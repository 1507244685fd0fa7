"""Whole blocks shared out in proportion to weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..table.budget import BlockBudget

#: Remainders that differ by less are equal: that is the noise of sums.
_NOISE = 1e-9


def in_whole_blocks(weights: Sequence[Tensor], mean: BlockBudget, tokens: Tensor) -> list[Tensor]:
    """Divide the budget of several layers in proportion to weights.

    Args:
        weights: `[rows, n]` for each layer, see `share_out`.
        mean: mean share.
        tokens: `[rows]` number of tokens of each row, beyond which a share is of no use.

    Returns:
        `[rows, n]` int64 tokens for each layer, on the CPU.
    """
    size, widths = mean.block_size, [layer_weights.shape[1] for layer_weights in weights]
    every = torch.cat([layer_weights.cpu() for layer_weights in weights], dim=1)
    blocks = share_out(every, mean.capacity // size * sum(widths), mean.smallest // size, -(-tokens // size))
    return list((blocks * size).split(widths, dim=1))


def share_out(weights: Tensor, total: int, least: int | Tensor, most: Tensor | None = None) -> Tensor:
    """Split `total` blocks in proportion to `weights`, exactly.

    Args:
        weights: `[rows, shares]`, not negative; a row of zeros counts as equal weights.
        total: blocks per row, at least `least * shares`.
        least: blocks that every share gets; `[rows]` where rows differ.
        most: `[rows]` blocks beyond which a share is of no use. What is left when all shares have as much is spread
            evenly.

    Returns:
        `[rows, shares]` int64 on the CPU; every row adds up to `total`. Fractions go to the largest remainders, the
        first of equals.
    """
    weights = weights.detach().double().cpu()
    rows, count = weights.shape
    limits = torch.full((rows, 1), total, device="cpu") if most is None else most.cpu().view(rows, 1)
    floor = torch.as_tensor(least, device="cpu").view(-1, 1)
    equal = torch.full_like(weights, total / count)
    weights = weights.where(weights.sum(-1, keepdim=True) > 0, 1.0)
    shares = _between(weights, total, floor.double(), limits.maximum(floor).double())
    return _whole(equal.where(limits * count <= total, shares), total)


def _between(weights: Tensor, total: int, least: Tensor, most: Tensor) -> Tensor:
    """Proportional to `weights` but for the shares that meet a bound.

    As the factor rises, the sum of the shares rises in straight lines that bend where a share meets a bound. So the
    shares are worked out at every bend, and taken from the line on which their sum is `total`.
    """
    bends = torch.cat([least / weights, most / weights], dim=-1)
    bends = bends.where(bends.isfinite(), 0.0).sort(dim=-1).values  # weights of zero grow when all others have the most
    one = torch.ones_like(weights)[:, None]
    lowest, highest = one * least[..., None], one * most[..., None]
    shares = (bends[..., None] * weights[:, None]).maximum(lowest).minimum(highest)
    shares = torch.cat([lowest, shares, highest], dim=1)
    sums = shares.sum(-1)  # [rows, bends + 2]
    begin = ((sums <= total).sum(-1, keepdim=True) - 1).clamp(0, sums.shape[1] - 2)
    below, above = sums.gather(1, begin), sums.gather(1, begin + 1)
    way = ((total - below) / (above - below)).nan_to_num(0.0)
    every = begin[..., None].expand(-1, -1, weights.shape[1])
    first, last = shares.gather(1, every)[:, 0], shares.gather(1, every + 1)[:, 0]
    return first + way * (last - first)


def _whole(shares: Tensor, total: int) -> Tensor:
    whole = (shares + _NOISE).floor()
    remainders = ((shares - whole) / _NOISE).round()
    order = remainders.argsort(dim=-1, descending=True, stable=True)
    missing = total - whole.sum(-1, keepdim=True)
    return whole.scatter_add(-1, order, (torch.arange(shares.shape[1], device="cpu") < missing).double()).long()
