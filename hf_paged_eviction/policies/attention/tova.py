"""TOVA, arXiv 2401.06104."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..base import ScoreContext
from ..heads import mean_over_heads
from ..registry import register_policy
from .last_query import LastQueryAttention


@register_policy("tova")
@dataclass(frozen=True)
class TOVA(LastQueryAttention):
    r"""Keeps what the newest query attends to, averaged over all query heads of the layer.

    .. math:: s_t = \frac{1}{H} \sum_{h=1}^{H} a^h_{\text{newest},t}

    `H` is the number of query heads. The average is over all of them with `heads="separate"` too, so all KV heads keep
    the same tokens. arXiv 2401.06104 evicts one token per step by the query of that step; here the last query of a
    block or of a prompt decides. The paper protects nothing; the cache protects the same tokens as for every policy.
    """

    paper: ClassVar[str | None] = "2401.06104"
    needs = replace(LastQueryAttention.needs, reads=())

    def attention(self, context: ScoreContext) -> Tensor:
        return mean_over_heads(context.statistics["attention"], context)
