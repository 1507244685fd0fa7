"""Which of several candidates goes first: one total order for tokens and for blocks.

A row must not depend on its batch, yet the same row computed in another batch differs in the last bit, and repeated
tokens have exactly equal scores. So scores are rounded before they are ranked, and equal ones are told apart by
position: the older goes first.
"""

import torch
from torch import Tensor

# Levels per power of two of the typical score: far above float32 noise, far below any difference that matters.
_LEVELS = 4096
_LARGEST_LEVEL = 2**30
KEEP = torch.iinfo(torch.int64).max
DROP = torch.iinfo(torch.int64).min


def rank_keys(scores: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
    """Distinct integers that order candidates from first evicted to last.

    Args:
        scores: `[batch, heads, candidates]` float32, high = keep.
        positions: same shape, int64, distinct among the valid candidates of a row and head.
        valid: same shape, bool. The others get the lowest key.

    Returns:
        `[batch, heads, candidates]` int64.
    """
    usable = valid & scores.isfinite()
    mean = scores.abs().where(usable, 0.0).sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp_min(1)
    # A power of two, so that the division is exact and the step hardly ever depends on the mean's last bit.
    scale = torch.exp2(torch.log2(mean).ceil()).where(mean > 0, 1.0)
    levels = (scores.nan_to_num(nan=float("-inf")) * (_LEVELS / scale)).round()
    levels = levels.clamp(-_LARGEST_LEVEL, _LARGEST_LEVEL).to(torch.int64)
    return (levels * 2**32 + positions).masked_fill(~valid, DROP)


def best_tokens(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """Indices `[batch, heads, count]` of the highest keys, ordered by position (pads, at -1, come first)."""
    kept = keys.topk(count, dim=-1, sorted=False).indices
    order = positions.gather(-1, kept).sort(dim=-1, stable=True).indices
    return kept.gather(-1, order)


def best_within(keys: Tensor, positions: Tensor, limits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `best_tokens`, with a limit of its own for each row and head.

    Args:
        keys, positions: `[batch, heads, candidates]`.
        limits: `[batch, heads]` int64, how many stay; where there are fewer candidates, pads make up for them.
        count: the largest limit.

    Returns:
        Indices `[batch, heads, count]` and their positions: pads (-1), real tokens by position, then slots beyond the
        limit (-1), whose index means nothing.
    """
    missing = max(count - keys.shape[-1], 0)
    padded = torch.nn.functional.pad(keys, (0, missing), value=DROP)
    positions = torch.nn.functional.pad(positions, (0, missing), value=-1)
    kept = padded.topk(count, dim=-1).indices
    held = positions.expand(-1, keys.shape[1], -1).gather(-1, kept)
    beyond = torch.arange(count, device=keys.device) >= limits[..., None]
    held, order = held.masked_fill(beyond, KEEP).sort(dim=-1, stable=True)
    return kept.gather(-1, order).clamp_max(keys.shape[-1] - 1), held.masked_fill(held == KEEP, -1)
