"""TOVA, arXiv 2401.06104."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..base import ScoreContext
from ..heads import mean_over_heads
from ..registry import register_policy
from .last_query import LastQueryAttention


@register_policy("tova")
@dataclass(frozen=True)
class TOVA(LastQueryAttention):
    r"""The attention of the newest query, averaged over all query heads: one set of tokens for all heads of a layer.

    .. math:: s_t = \frac{1}{H} \sum_{h=1}^{H} a^h_{\text{newest},t}

    The average is over all heads with `heads="separate"` too, so that all heads still agree. The paper evicts one
    token per step by that step's query; here the last query of a block, or of a prompt, speaks for it. The paper
    protects nothing; the cache protects the same tokens for every policy.
    """

    paper: ClassVar[str | None] = "2401.06104"

    def attention(self, context: ScoreContext) -> Tensor:
        return mean_over_heads(context.statistics["attention"], context)
