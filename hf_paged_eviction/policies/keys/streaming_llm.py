"""StreamingLLM, arXiv 2309.17453."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..needs import Needs
from ..registry import register_policy


@register_policy("streaming_llm")
@dataclass(frozen=True)
class StreamingLLM(EvictionPolicy):
    r"""Keeps the first `n_sink` tokens (attention sinks) and the newest ones.

    .. math:: s_t = \begin{cases} \infty & p_t < n_\text{sink} \\ p_t & \text{otherwise} \end{cases}

    `p` is the position of the token in the text. Keys keep their positions; the authors' code counts positions inside
    the cache, which is `positions="cache"` here. The cache protects the `n_sink` first tokens and no others, unless you
    give `sink_tokens`. From arXiv 2309.17453.

    Args:
        n_sink: number of first tokens of the row that are pinned; 4 in the paper.

    Raises:
        ValueError: `n_sink` is negative.
    """

    n_sink: int = 4

    paper: ClassVar[str | None] = "2309.17453"

    def __post_init__(self) -> None:
        if isinstance(self.n_sink, bool) or not isinstance(self.n_sink, int) or self.n_sink < 0:
            raise ValueError(f"n_sink counts tokens and cannot be negative, got {self.n_sink!r}.")

    @property
    def needs(self) -> Needs:
        """The cache protects the `n_sink` first tokens."""
        return Needs(token_local=True, by_layer=False, sink_tokens=self.n_sink)

    def score(self, context: ScoreContext) -> Tensor:
        return context.positions.float().masked_fill(context.positions < self.n_sink, float("inf"))
