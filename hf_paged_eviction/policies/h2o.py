"""H2O, arXiv 2306.14048."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import ScoreContext
from .checks import check_flag
from .registry import register_policy
from .running_attention import RunningAttention


@register_policy("h2o")
@dataclass(frozen=True)
class H2O(RunningAttention):
    r"""All the attention that a token has received so far, summed over queries and averaged over query heads.

    .. math:: s_t = \frac{1}{n_t} \sum_q a_{q,t}, \quad \text{with normalised=False: } s_t = \sum_q a_{q,t}

    The sum favours early tokens: more queries could see them. `normalised` divides it by their number. The paper's
    sum is not divided, and its recent half of the budget is here what the cache protects (the newest block). The paper
    evicts a token at every step, the cache a block when one is full.

    Args:
        normalised: divide by the number of queries that could see the token.

    Raises:
        ValueError: `normalised` is neither True nor False.
    """

    normalised: bool = True

    paper: ClassVar[str | None] = "2306.14048"

    def __post_init__(self) -> None:
        check_flag("normalised", self.normalised)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.mean(context) if self.normalised else context.statistics["attention"]
