"""KVzip, arXiv 2505.23416: the scoring half."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...attention.weights import Attention
from ..attention_policy import AttentionPolicy
from ..base import ScoreContext, Statistics
from ..needs import Needs
from ..registry import register_policy


@register_policy("kvzip")
@dataclass(frozen=True)
class KVzip(AttentionPolicy):
    r"""The largest weight that any query, in any query head of the group, has ever paid the token.

    .. math:: s_t = \max_{q, h} a^h_{q,t}

    This is KVzip's score if the queries are those of a probe ("repeat the previous context", then the context itself)
    that runs over the whole cache before anything is evicted. `recipes.probe.compress_by_probe` does that:
    make a cache with this policy, heads="separate" and room for the context, and it is read, probed and shrunk.
    `paged-eviction eval` does so by itself. Without it the queries are the text's own, and the score is the same
    formula on ordinary attention. KVzip also has one threshold for all layers and heads: `allocator="global"`
    with heads="separate" is that half.
    """

    paper: ClassVar[str | None] = "2505.23416"
    needs = Needs(heads="separate", by_probe=True, common_unit=True, token_statistics=("attention",))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"attention": torch.maximum(statistics["attention"], attention.weights.amax((2, 3)))}

    def attention(self, context: ScoreContext) -> Tensor:
        return context.statistics["attention"]
