"""H2O, arXiv 2306.14048."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..base import ScoreContext
from ..checks import check_between, check_flag
from ..registry import register_policy
from .running_attention import RunningAttention


@register_policy("h2o")
@dataclass(frozen=True)
class H2O(RunningAttention):
    r"""Keeps the newest tokens and, of the others, those that received the most attention in total (heavy hitters).

    .. math::

        s_t = \begin{cases} \infty & p_t \ge \text{seen} - \text{recent} \cdot \text{budget} \\
        \sum_q a_{q,t} & \text{otherwise} \end{cases}

    `a` is averaged over the query heads that share a KV head. `seen` is the length of the text. As in arXiv 2306.14048,
    half of the budget is reserved for the newest tokens and the sum is not divided by the number of queries, which
    favours early tokens, because more queries could see them. `h2o(normalised=True, recent=0)` gives the mean attention
    per query, like `attention_mean`. The paper evicts one token at every step; the cache evicts a block whenever one is
    full.

    Args:
        normalised: divide by the number of queries that could see the token.
        recent: share of the budget that is reserved for the newest tokens.

    Raises:
        ValueError: a parameter is out of range.
    """

    normalised: bool = False
    recent: float = 0.5

    paper: ClassVar[str | None] = "2306.14048"
    needs = replace(RunningAttention.needs, reads_budget=True, reads=())

    def __post_init__(self) -> None:
        check_flag("normalised", self.normalised)
        check_between("recent", self.recent, 0, 1)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.mean(context) if self.normalised else context.statistics["attention"]

    def score(self, context: ScoreContext) -> Tensor:
        first = context.seen[:, None, None] - self.recent * context.budget
        return self.attention(context).masked_fill(context.positions >= first, float("inf"))
