"""SAGE-KV, arXiv 2503.08879."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import ScoreContext
from .last_query import LastQueryAttention
from .registry import register_policy


@register_policy("sage_kv")
@dataclass(frozen=True)
class SageKV(LastQueryAttention):
    r"""The attention of the newest query, for each KV head on its own (use `heads="separate"`).

    .. math:: s_t = a_{\text{newest},t}

    At the end of a prompt this is the paper's choice, between the sinks and the recent tokens that the cache protects;
    the paper does not say how the query heads of a group are joined, here they are averaged. Afterwards the paper
    fixes the choice and lets only the recent window slide. A cache of fixed blocks has no such window, so here the last
    query of each filled block judges again.
    """

    paper: ClassVar[str | None] = "2503.08879"

    def attention(self, context: ScoreContext) -> Tensor:
        return context.statistics["attention"]
