"""Weights of queries by age."""

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..base import Statistics


def fading(statistics: Statistics, attention: Attention, horizon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh queries by age: `exp(-age / horizon)`, 1 for the newest query.

    Args:
        statistics: may contain "newest" `[batch]`, the position of the newest query so far.
        attention: the next queries.
        horizon: number of tokens after which the weight has fallen to 1/e.

    Returns:
        The weight of each query `[batch, q]`, 0 if it does not count; the factor `[batch]` for earlier sums; the new
        value of "newest". The sums do not depend on how many pieces the queries come in.
    """
    positions = attention.query_positions
    newest = positions.amax(-1).float()
    before = statistics.get("newest")
    before = torch.full_like(newest, -1.0) if before is None else before
    newest = torch.maximum(newest, before)
    ages = newest[:, None] - positions
    return torch.exp(-ages / horizon) * attention.counts, torch.exp((before - newest) / horizon), newest
