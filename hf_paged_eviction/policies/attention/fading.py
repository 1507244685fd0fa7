"""Averages over queries in which the newest count most."""

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import Statistics


def fading(statistics: Statistics, attention: Attention, horizon: float) -> tuple[Tensor, Tensor, Tensor]:
    """How much queries count, by age: `exp(-age / horizon)`, the newest one 1.

    Args:
        statistics: with "newest" `[batch]`, the position of the newest query so far, if there was one.
        attention: the next queries.
        horizon: in tokens.

    Returns:
        Weight of each query `[batch, q]`, 0 where it does not count; factor `[batch]` on what was added up before; the
        new value of "newest". The sums do not depend on how many pieces the queries come in.
    """
    positions = attention.query_positions
    newest = positions.amax(-1).float()
    before = statistics.get("newest")
    before = torch.full_like(newest, -1.0) if before is None else before
    newest = torch.maximum(newest, before)
    ages = newest[:, None] - positions
    return torch.exp(-ages / horizon) * attention.counts, torch.exp((before - newest) / horizon), newest
