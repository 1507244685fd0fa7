"""H2O, arXiv 2306.14048."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..attention_rows import Attention
from .base import EvictionPolicy, ScoreContext, Statistics
from .registry import register_policy


@register_policy("h2o")
@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """All the attention that a token has received so far, summed over queries and averaged over query heads.

    The sum favours early tokens: more queries could see them. `normalised` divides it by their number.

    Args:
        normalised: divide by the number of queries that could see the token.
    """

    paper: ClassVar[str | None] = "2306.14048"

    normalised: bool = True

    @property
    def token_statistics(self) -> tuple[str, ...]:
        return ("attention", "queries")

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {
            "attention": statistics["attention"] + attention.weights.mean(2).sum(2),
            "queries": statistics["queries"] + attention.visible[:, :, 0].sum(2),
        }

    def score(self, context: ScoreContext) -> Tensor:
        attention = context.statistics["attention"]
        return attention / context.statistics["queries"].clamp_min(1) if self.normalised else attention
