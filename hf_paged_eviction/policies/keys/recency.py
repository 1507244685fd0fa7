"""Recency: a sliding window over the row's tokens, nothing else."""

from dataclasses import dataclass

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy


@register_policy("recency")
@dataclass(frozen=True)
class Recency(EvictionPolicy):
    r"""Evicts the oldest token first: a sliding window.

    .. math:: s_t = p_t

    `p` is the position of the token in the text. First tokens are not protected, unless you give `sink_tokens`.
    """

    needs = Needs(token_local=True, by_layer=False, sink_tokens=0)

    def score(self, context: ScoreContext) -> Tensor:
        return context.positions.float()
