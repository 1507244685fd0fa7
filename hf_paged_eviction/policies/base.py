"""What a policy is given and what it must return."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class ScoreContext:
    """The tokens of one layer that are to be scored.

    Attributes:
        keys: `[batch, kv_heads, tokens, head_dim]`, as cached (after rotary embedding), in the model's dtype.
        values: `[batch, kv_heads, tokens, value_dim]`.
        positions: `[batch, kv_heads, tokens]` int64. 0 is the first real token of the row; -1 marks a pad, whose
            score is ignored.
        seen: `[batch]` int64, real tokens the row has seen so far.
        layer_idx: index of the layer in the model.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    layer_idx: int

    @property
    def valid(self) -> Tensor:
        """`[batch, kv_heads, tokens]` bool, False for pads."""
        return self.positions >= 0


class EvictionPolicy(ABC):
    """Scores tokens. Reduction over heads and blocks, protection and ties belong to the cache.

    A policy holds parameters only, never state of a run: one object may serve many caches.

    Class attributes:
        name: set by `register_policy`.
        paper: arXiv id, or None.
        token_local: True if a token's score depends on nothing but its own key, value and position. Such a score is
            computed once, when the token's block fills. A policy that compares tokens (KeyDiff) leaves it False and
            is asked again about all held tokens at every eviction.
        supports_mla: False if the score is meaningless where a layer caches latents instead of keys and values
            (multi-head latent attention).
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str | None] = None
    token_local: ClassVar[bool] = False
    supports_mla: ClassVar[bool] = True

    @abstractmethod
    def score(self, context: ScoreContext) -> Tensor:
        """Return `[batch, kv_heads, tokens]`, float32, high = keep. `inf` pins a token, nan counts as lowest."""
