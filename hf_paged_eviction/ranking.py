"""One total order of candidates for eviction, for tokens and for blocks.

A row must not depend on its batch. But the same row computed in another batch differs in the last bits, and repeated
tokens have exactly equal scores. So scores are rounded before they are ranked, and of equal scores the older token goes
first.

The rounding must be coarser than the noise and finer than any difference that matters. The noise of a sum, product or
quotient of numbers of one sign is proportional to the result: attention of 1e-9 is as exact, relatively, as attention
of 0.5. The noise of a difference is proportional to the numbers that were subtracted: a cosine near 0 is as uncertain
as one near 1.
"""

import torch
from torch import Tensor

# Levels per power of two: far above float32 noise, far below any difference that matters.
_LEVELS = 4096
_DROPPED_BITS = 11  # of the 23 that a float32 has below its leading one: 2**12 levels are left
_LARGEST_LEVEL = 2**30
# Exponent fields of float32, in place: 2**-100 and 2**127. Smaller and larger scales are not needed.
_SMALLEST_SCALE, _LARGEST_SCALE = 27 << 23, 254 << 23
KEEP = torch.iinfo(torch.int64).max
DROP = torch.iinfo(torch.int64).min


def rank_keys(scores: Tensor, positions: Tensor, valid: Tensor, absolute_noise: bool = False) -> Tensor:
    """Distinct integers that order candidates from first evicted to last.

    A key is `level * 2**32 + position`, where the level is the rounded score. nan counts as -inf. Zeros of both signs
    are equal.

    Args:
        scores: `[batch, heads, candidates]` float32, high = keep.
        positions: same shape, int64, distinct among the valid candidates of a row and head, from 0 to `2**32 - 1`.
        valid: same shape, bool. Invalid candidates get the lowest key.
        absolute_noise: False rounds each score to 12 bits after its leading one. (Below 1e-38, where float32 has
            fewer bits, to whole steps of 2**-138.) True rounds to 1/4096 of the power of two at or above the mean size
            of the valid, finite scores of the row and head, see `Needs.absolute_noise`.

    Returns:
        `[batch, heads, candidates]` int64.
    """
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    levels = _levels_of_scale(scores, valid) if absolute_noise else _levels_of_each(scores)
    return (levels * 2**32 + positions).masked_fill(~valid, DROP)


def _rising(scores: Tensor) -> Tensor:
    """The bits of a float are its exponent and mantissa, so as an integer they rise with it; if negative, they fall."""
    bits = scores.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _levels_of_each(scores: Tensor) -> Tensor:
    return ((_rising(scores) + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS).to(torch.int64)


def _levels_of_scale(scores: Tensor, valid: Tensor) -> Tensor:
    return (scores / _step_of_scale(scores, valid)).round().clamp(-_LARGEST_LEVEL, _LARGEST_LEVEL).to(torch.int64)


def _step_of_scale(scores: Tensor, valid: Tensor) -> Tensor:
    """`[batch, heads, 1]` a power of two, 1/4096 of that at or above the mean size."""
    usable = valid & scores.isfinite()
    # Divided before they are added up, so that the sum cannot overflow.
    shares = scores.abs() / usable.sum(-1, keepdim=True).clamp_min(1)
    return _power_of_two(shares.where(usable, 0.0).sum(-1, keepdim=True)) / _LEVELS


def without_noise(differences: Tensor, sizes: Tensor) -> Tensor:
    """Replace differences by zero if they are so small that they are noise.

    Args:
        differences: float32 differences of numbers of these `sizes`.
        sizes: float32, not negative, broadcastable to `differences`.
    """
    return differences.masked_fill(differences.abs() * _LEVELS <= sizes, 0.0)


def _power_of_two(sizes: Tensor) -> Tensor:
    """The power of two at or above each size, from 2**-100 to 2**127.

    It makes divisions exact, and hardly ever depends on the last bit of a size.
    """
    exponents = (sizes.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return exponents.clamp(_SMALLEST_SCALE, _LARGEST_SCALE).view(torch.float32)


def best_tokens(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """Indices `[batch, heads, count]` of the highest keys, ordered by position (pads, at -1, come first)."""
    kept_indices = keys.topk(count, dim=-1, sorted=False).indices
    order = positions.gather(-1, kept_indices).sort(dim=-1, stable=True).indices
    return kept_indices.gather(-1, order)


def not_kept(positions: Tensor, kept_indices: Tensor, kept_positions: Tensor) -> Tensor:
    """`[batch, heads, candidates]` bool: the real tokens at `positions` that are not among the kept ones.

    Args:
        positions: `[batch, 1 or heads, candidates]`.
        kept_indices: `[batch, heads, count]` int64 along the candidates.
        kept_positions: `[batch, heads, count]` positions of these tokens; where one is -1, its index means nothing.
    """
    positions = positions.expand(-1, kept_indices.shape[1], -1)
    stays = torch.zeros_like(positions).scatter_add(-1, kept_indices, (kept_positions >= 0).long())
    return (positions >= 0) & (stays == 0)


def best_within(keys: Tensor, positions: Tensor, limits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like `best_tokens`, with a separate limit for each row and head.

    Args:
        keys, positions: `[batch, heads, candidates]`.
        limits: `[batch, heads]` int64, number of tokens that stay. Pads (-1) fill up if there are fewer candidates.
        count: the largest limit.

    Returns:
        Indices `[batch, heads, count]` and their positions: pads (-1), real tokens by position, then slots beyond the
        limit (-1), whose index means nothing.
    """
    missing = max(count - keys.shape[-1], 0)
    padded = torch.nn.functional.pad(keys, (0, missing), value=DROP)
    positions = torch.nn.functional.pad(positions, (0, missing), value=-1)
    kept_indices = padded.topk(count, dim=-1).indices
    held = positions.expand(-1, keys.shape[1], -1).gather(-1, kept_indices)
    places = torch.arange(count, device=keys.device)
    beyond = places >= limits[..., None]
    held, order = held.masked_fill(beyond, KEEP).sort(dim=-1, stable=True)
    return kept_indices.gather(-1, order).clamp_max(keys.shape[-1] - 1), held.masked_fill(held == KEEP, -1)
