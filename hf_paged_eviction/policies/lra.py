"""Least recently attended, after Attendre, arXiv 2401.04881."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..queries.weights import Attention
from .hits import LastHit, above_uniform
from .registry import register_policy


@register_policy("lra")
@dataclass(frozen=True)
class LRA(LastHit):
    r"""How recently a query attended to the token: the least recently attended goes first.

    .. math:: s_t = -\min \{ \text{now} - q : a^h_{q,t} > 1 / |a^h_q| \text{ for some } h \}

    Minus the number of tokens since that query. A query attends to a token if some query head of the group pays it
    more than its even share, 1/n of the n tokens it sees. The paper names the rule but its formulas are not
    published: this definition is ours. There the memory is judged per chunk, here when a block is full.
    """

    paper: ClassVar[str | None] = "2401.04881"

    def hits(self, attention: Attention) -> Tensor:
        return above_uniform(attention)
