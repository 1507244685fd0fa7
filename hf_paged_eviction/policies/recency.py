"""Recency: a sliding window over the row's tokens."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import EvictionPolicy, ScoreContext
from .registry import register_policy


@register_policy("recency")
@dataclass(frozen=True)
class Recency(EvictionPolicy):
    r"""The position itself: the oldest token that is not protected goes first.

    .. math:: s_t = p_t
    """

    token_local: ClassVar[bool] = True
    by_layer: ClassVar[bool] = False

    def score(self, context: ScoreContext) -> Tensor:
        return context.positions.float()
