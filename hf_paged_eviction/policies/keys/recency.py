"""Recency: a sliding window over the row's tokens, nothing else."""

from dataclasses import dataclass

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy


@register_policy("recency")
@dataclass(frozen=True)
class Recency(EvictionPolicy):
    r"""The position itself: the oldest token goes first. No first tokens stay, unless `sink_tokens` says so.

    .. math:: s_t = p_t
    """

    needs = Needs(token_local=True, by_layer=False, sink_tokens=0)

    def score(self, context: ScoreContext) -> Tensor:
        return context.positions.float()
