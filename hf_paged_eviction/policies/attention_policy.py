"""Policies whose score is, or rests on, the attention that tokens receive."""

from abc import abstractmethod

from torch import Tensor

from .base import EvictionPolicy, ScoreContext


class AttentionPolicy(EvictionPolicy):
    """Knows an amount of attention per token, which is the score unless `score` says otherwise.

    Here, as in all policies that observe, attention is worked out block by block: the queries of single tokens are
    compared with the tokens that are held when their block is full, where the papers note each step's own weights. What
    was overwritten in between is missing from those rows; the weights of each query still sum to one.
    """

    @abstractmethod
    def attention(self, context: ScoreContext) -> Tensor:
        """Return `[batch, kv_heads, tokens]` float32, not negative and on any scale. Pads may hold anything."""

    def score(self, context: ScoreContext) -> Tensor:
        return self.attention(context)
