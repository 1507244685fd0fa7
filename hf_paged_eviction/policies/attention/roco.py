"""RoCo, arXiv 2402.06262."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...attention.weights import Attention
from ...ranking import without_noise
from ..base import ScoreContext, Statistics
from ..checks import check_between
from ..needs import Needs
from ..registry import register_policy
from ..text_order import best_first
from .running_attention import RunningAttention


@register_policy("roco")
@dataclass(frozen=True)
class RoCo(RunningAttention):
    r"""Keeps the tokens with the highest mean attention, and first of all those whose attention varies most.

    .. math:: s_t = \mu_t + \mathbb{1}[\sigma_t \text{ among the largest}] \max_u \mu_u

    `mu` and `sigma` are the mean and the standard deviation of the attention over all queries that could see the token,
    averaged over the query heads that share a KV head. The share `safe` of the tokens with the largest `sigma` is put
    above all others.

    In arXiv 2402.06262 these tokens are never evicted. Here they are evicted last, lowest mean first, if more must go
    than all the others, as at the end of a long prompt. The paper evicts token by token and protects the newest ones;
    here the cache protects them and evicts blocks.

    Args:
        safe: share of the tokens that is put above the others; 0.3 in the authors' code (0.1 for prompts).

    Raises:
        ValueError: `safe` is not between 0 and 1.
    """

    safe: float = 0.3

    paper: ClassVar[str | None] = "2402.06262"
    needs = Needs(token_statistics=("attention", "squares"))

    def __post_init__(self) -> None:
        check_between("safe", self.safe, 0, 1)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        squares = statistics["squares"] + attention.weights.mean(2).square().sum(2)
        return super().observe(statistics, attention) | {"squares": squares}

    def attention(self, context: ScoreContext) -> Tensor:
        return self.mean(context)

    def score(self, context: ScoreContext) -> Tensor:
        mean = self.mean(context)
        squares = context.statistics["squares"] / context.queries.clamp_min(1)
        variance = without_noise((squares - mean.square()).clamp_min(0), squares)
        _, rank = best_first(variance, context.positions)
        allowed = (context.valid.sum(-1, keepdim=True) * self.safe).floor()
        safe = rank < allowed
        highest = mean.masked_fill(safe | ~context.valid, 0.0).amax(-1, keepdim=True)
        return mean + highest * safe
