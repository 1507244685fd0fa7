"""Plain mean of attention."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..base import ScoreContext
from ..registry import register_policy
from .running_attention import RunningAttention


@register_policy("attention_mean")
@dataclass(frozen=True)
class AttentionMean(RunningAttention):
    r"""Keeps the tokens that receive the most attention per query.

    .. math:: s_t = \frac{1}{n_t} \sum_q a_{q,t}

    The sum runs over all observed queries, and `n` counts those that could see the token. This is the plain baseline of
    the policies that look at attention, and comes from no paper. The scores are those of `h2o(normalised=True,
    recent=0)`.
    """

    needs = replace(RunningAttention.needs, reads=())

    def attention(self, context: ScoreContext) -> Tensor:
        return self.mean(context)
