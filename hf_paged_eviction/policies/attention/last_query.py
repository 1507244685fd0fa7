"""Attention of the newest query alone."""

from dataclasses import replace

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..attention_policy import AttentionPolicy
from ..base import Statistics
from ..needs import Needs


class LastQueryAttention(AttentionPolicy):
    """Keeps what the row's newest query attended to. Query heads of a group: mean."""

    needs = Needs(token_statistics=("attention",), window=1)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        last = newest_alone(attention)
        weights = last.weights.mean(2)[:, :, 0]
        return {"attention": torch.where(last.counts[:, :, None], weights, statistics["attention"])}


def newest_alone(attention: Attention) -> Attention:
    """The same with one query per row: the newest that counts."""
    positions, place = attention.query_positions.max(-1, keepdim=True)
    index: Tensor = place[:, None, :, None].expand(-1, attention.queries.shape[1], -1, attention.queries.shape[-1])
    return replace(attention, queries=attention.queries.gather(2, index), query_positions=positions)
