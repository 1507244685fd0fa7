"""Policies whose score is, or rests on, the attention that tokens receive."""

from abc import abstractmethod

from torch import Tensor

from .base import EvictionPolicy, ScoreContext


class AttentionPolicy(EvictionPolicy):
    """A policy that attributes attention to tokens. The attention is also the score, unless `score` is overridden.

    As in all policies that observe, attention is computed block by block: the queries of decoded tokens are compared
    with the held tokens when their block is full, where the papers use the weights of each step. Tokens that were
    overwritten in between are missing; the weights of each query still sum to one.
    """

    @abstractmethod
    def attention(self, context: ScoreContext) -> Tensor:
        """Return `[batch, kv_heads, tokens]` float32, not negative and on any scale. Pads may hold anything."""

    def score(self, context: ScoreContext) -> Tensor:
        return self.attention(context)
