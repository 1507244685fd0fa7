"""Rounding to few bits, written out from its definition."""

import math
from functools import cache
from random import Random

import torch
from torch import Tensor


@cache
def slow_turn(dim: int) -> Tensor:
    """Entry by entry: a sign per channel, (-1) ** (common bits) for the power of two, cos + sin for the odd rest."""
    odd = dim
    while odd % 2 == 0:
        odd //= 2
    draw = Random(dim)
    signs = [draw.choice((-1.0, 1.0)) for _ in range(dim)]
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for row in range(dim):
        for column in range(dim):
            common = bin((row // odd) & (column // odd)).count("1")
            angle = 2 * math.pi * (row % odd) * (column % odd) / odd
            entry = (-1) ** common * (math.cos(angle) + math.sin(angle)) / math.sqrt(dim)
            matrix[row, column] = signs[row] * entry
    return matrix


def slow_round(states: Tensor, bits: int | None, turned: bool) -> Tensor:
    """`[..., dim]` as they are read after they were kept in so many bits."""
    if bits is None:
        return states
    turn = slow_turn(states.shape[-1]).to(states) if turned else torch.eye(states.shape[-1]).to(states)
    numbers, levels = states @ turn, 2**bits - 1
    reach = numbers.abs().max(-1, keepdim=True).values
    best, least = numbers, torch.full_like(reach, math.inf)
    for share in {2: (1.0, 0.85, 0.7), 3: (1.0, 0.9, 0.8), 4: (1.0, 0.95, 0.9)}.get(bits, (1.0,)):
        less = min(1.0, math.sqrt(math.log(64) / math.log(max(states.shape[-1], 2))))
        step = (2 * less ** (share < 1) * share * reach / levels).bfloat16().to(states)
        index = torch.nan_to_num(numbers / step, 0.0, 0.0, 0.0).add(levels / 2).round().clamp(0, levels)
        rounded = step * (index - levels / 2)
        error = ((rounded - numbers) ** 2).sum(-1, keepdim=True)
        better = error < 0.999 * least
        best, least = torch.where(better, rounded, best), torch.where(better, error, least)
    return best @ turn.T


def slow_sizes(states: Tensor) -> Tensor:
    """`[heads, dim]` of tokens `[heads, n, dim]`: the fourth root of the squares of channels, beside the mean over
    channels; 16 more tokens have all channels alike, and so have tokens that are nothing but zeros."""
    squares = states.square().mean(1)
    whole = squares.mean(-1, keepdim=True)
    count, shares = states.shape[1], torch.where(whole > 0, squares / whole, 1.0)
    return ((count * shares + 16) / (count + 16)).pow(0.25).bfloat16().to(states)
