"""Plain mean of attention."""

from dataclasses import dataclass

from torch import Tensor

from ..base import ScoreContext
from ..registry import register_policy
from .running_attention import RunningAttention


@register_policy("attention_mean")
@dataclass(frozen=True)
class AttentionMean(RunningAttention):
    r"""The attention that a query pays the token on average, over all queries so far that could see it.

    .. math:: s_t = \frac{1}{n_t} \sum_q a_{q,t}

    Not from a paper: the plain baseline of the query-aware policies. The same numbers as `h2o(normalised=True)`, under
    a name that promises no more than it is.
    """

    def attention(self, context: ScoreContext) -> Tensor:
        return self.mean(context)
