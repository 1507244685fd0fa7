"""Least frequently attended, after Attendre, arXiv 2401.04881."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..queries.weights import Attention
from .hits import HitRate, above_uniform
from .registry import register_policy


@register_policy("lfa")
@dataclass(frozen=True)
class LFA(HitRate):
    r"""How often queries attend to the token: the least frequently attended goes first.

    .. math:: s_t = \frac{1}{n_t} |\{ q : a^h_{q,t} > 1 / |a^h_q| \text{ for some } h \}|

    The share of the queries that could see the token. A query attends to a token if some query head of the group pays
    it more than its even share, 1/n of the n tokens it sees. The paper names the rule but its formulas are not
    published: this definition is ours. There the memory is judged per chunk, here when a block is full.
    """

    paper: ClassVar[str | None] = "2401.04881"

    def hits(self, attention: Attention) -> Tensor:
        return above_uniform(attention)
