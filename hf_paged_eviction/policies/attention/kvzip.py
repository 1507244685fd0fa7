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
    r"""Keeps the tokens that any query, in any query head of the group, has paid the largest weight.

    .. math:: s_t = \max_{q, h} a^h_{q,t}

    In KVzip (arXiv 2505.23416) the queries are those of a probe: the model reads "repeat the previous context" and the
    context again, over the whole cache, before anything is evicted. `compress_by_probe` does this with a cache that has
    `heads="separate"` and room for the whole context; `paged-eviction eval` calls it by itself. Without a probe the
    queries are those of the text, with the same formula.

    KVzip compares all layers and heads by one threshold; here each layer, or each head, has a budget of its own.
    """

    paper: ClassVar[str | None] = "2505.23416"
    needs = Needs(heads="separate", by_probe=True, token_statistics=("attention",))

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        return {"attention": torch.maximum(statistics["attention"], attention.weights.amax((2, 3)))}

    def attention(self, context: ScoreContext) -> Tensor:
        return context.statistics["attention"]
