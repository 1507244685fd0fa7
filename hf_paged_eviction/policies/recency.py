"""Recency: a sliding window over the row's tokens."""

from dataclasses import dataclass

from torch import Tensor

from .base import EvictionPolicy, ScoreContext
from .needs import Needs
from .registry import register_policy


@register_policy("recency")
@dataclass(frozen=True)
class Recency(EvictionPolicy):
    r"""The position itself: the oldest token that is not protected goes first.

    .. math:: s_t = p_t
    """

    needs = Needs(token_local=True, by_layer=False)

    def score(self, context: ScoreContext) -> Tensor:
        return context.positions.float()
