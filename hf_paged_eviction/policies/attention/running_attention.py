"""Attention added up since a token arrived."""

from torch import Tensor

from ...attention.weights import Attention
from ..attention_policy import AttentionPolicy
from ..base import ScoreContext, Statistics
from ..needs import Needs


class RunningAttention(AttentionPolicy):
    """Sums the attention that a token receives, averaged over the query heads of a group."""

    needs = Needs(token_statistics=("attention",))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"attention": statistics["attention"] + attention.weights.sum((2, 3)) / attention.weights.shape[2]}

    def mean(self, context: ScoreContext) -> Tensor:
        """Attention per query that could see the token."""
        return context.statistics["attention"] / context.queries.clamp_min(1)
