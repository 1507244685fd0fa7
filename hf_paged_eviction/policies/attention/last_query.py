"""Attention of the newest query alone."""

from dataclasses import replace

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..attention_policy import AttentionPolicy
from ..base import Statistics
from ..needs import Needs


class LastQueryAttention(AttentionPolicy):
    """Keeps the tokens that the row's newest query attended to, averaged over the query heads of a group."""

    needs = Needs(token_statistics=("attention",), window=1)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        last = newest_alone(attention)
        weights = last.weights.mean(2)[:, :, 0]
        return {"attention": torch.where(last.counts[:, :, None], weights, statistics["attention"])}


def newest_alone(attention: Attention) -> Attention:
    """The attention with one query per row: the newest one that counts."""
    positions, place = attention.query_positions.max(-1, keepdim=True)
    index: Tensor = place[:, None, :, None].expand(-1, attention.queries.shape[1], -1, attention.queries.shape[-1])
    return replace(attention, queries=attention.queries.gather(2, index), query_positions=positions)
