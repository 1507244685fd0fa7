"""Attention as yes or no: which queries used a token, when last, how often."""

from abc import abstractmethod

import torch
from torch import Tensor

from ..queries.weights import Attention
from .base import EvictionPolicy, ScoreContext, Statistics
from .needs import Needs

#: Weights closer than this, relatively, are equal: the last bits must not decide.
_CLOSE = 1e-5


def among_the_top(attention: Attention, count: int) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: one of the `count` largest weights of a query head of the group."""
    weights = attention.weights
    least = weights.topk(min(count, weights.shape[-1]), dim=-1).values[..., -1:]
    return ((weights >= least * (1 - _CLOSE)) & (weights > 0)).any(2)


def above_uniform(attention: Attention) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: a query head pays more than if it paid all tokens it sees the same."""
    seen = attention.visible.sum(-1, keepdim=True)
    return (attention.weights * seen > 1 + _CLOSE).any(2)


def above_percentile(attention: Attention, percentile: int) -> Tensor:
    """`[batch, kv_heads, q, tokens]` bool: among the top `100 - percentile` percent of a query head's weights."""
    ordered = attention.weights.sort(dim=-1, descending=True).values
    place = attention.visible.sum(-1, keepdim=True) * (100 - percentile) // 100
    least = ordered.gather(-1, place.expand(*ordered.shape[:-1], 1))
    return (attention.weights > least * (1 + _CLOSE)).any(2)


class LastHit(EvictionPolicy):
    """Scores by how long ago the last query was that used the token."""

    @abstractmethod
    def hits(self, attention: Attention) -> Tensor:
        """`[batch, kv_heads, q, tokens]` bool, which queries use which tokens."""

    @property
    def needs(self) -> Needs:
        return Needs(token_statistics=("used",))  # position after the last query that used it; 0 = never

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        after = (attention.query_positions + 1)[:, None, :, None]
        used = torch.where(self.hits(attention), after, 0).amax(2)
        return {"used": torch.maximum(statistics["used"], used.float())}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["used"] - context.seen[:, None, None]


class HitRate(EvictionPolicy):
    """Scores by the share of queries that used the token, of those that could see it."""

    needs = Needs(token_statistics=("uses",))

    @abstractmethod
    def hits(self, attention: Attention) -> Tensor:
        """`[batch, kv_heads, q, tokens]` bool, which queries use which tokens."""

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"uses": statistics["uses"] + self.hits(attention).sum(2)}

    def score(self, context: ScoreContext) -> Tensor:
        return context.statistics["uses"] / context.queries.clamp_min(1)
