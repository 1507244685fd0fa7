"""Whole blocks shared out in proportion to weights."""

import torch
from torch import Tensor


def share_out(weights: Tensor, total: int, least: int, most: Tensor | None = None) -> Tensor:
    """Split `total` blocks in proportion to `weights`, exactly.

    Args:
        weights: `[rows, shares]`, not negative; a row of zeros counts as equal weights.
        total: blocks per row, at least `least * shares`.
        least: blocks that every share gets.
        most: `[rows]` blocks beyond which a share is of no use. What is left when all shares have as much is spread
            evenly.

    Returns:
        `[rows, shares]` int64 on the CPU; every row adds up to `total`. Fractions go to the largest remainders, the
        first of equals.
    """
    rows = weights.double().cpu().tolist()
    limits = [total] * len(rows) if most is None else most.tolist()
    return torch.tensor([_share_row(row, total, least, limit) for row, limit in zip(rows, limits, strict=True)])


def _share_row(weights: list[float], total: int, least: int, most: int) -> list[int]:
    count = len(weights)
    if most * count <= total:
        return _round([total / count] * count, total)
    weights = weights if sum(weights) > 0 else [1.0] * count
    quota = _clamped(weights, float(total), float(least), float(max(most, least)))
    return _round(quota, total)


def _clamped(weights: list[float], total: float, least: float, most: float) -> list[float]:
    """Proportional to `weights` but for those that meet a bound: the factor that fits is found by bisection."""

    def shares(factor: float) -> list[float]:
        return [min(max(weight * factor, least), most) for weight in weights]

    low, high = 0.0, total / min((weight for weight in weights if weight > 0), default=1.0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    found = shares(high)
    missing = total - sum(found)  # weights of zero stay at the least: the rest takes what they cannot
    room = [most - share for share in found]
    spare = sum(room)
    return [share + missing * free / spare if spare > 0 else share for share, free in zip(found, room, strict=True)]


def _round(quota: list[float], total: int) -> list[int]:
    whole = [int(share + 1e-9) for share in quota]
    rest = sorted(range(len(quota)), key=lambda at: (whole[at] - quota[at], at))
    for at in rest[: total - sum(whole)]:
        whole[at] += 1
    return whole
