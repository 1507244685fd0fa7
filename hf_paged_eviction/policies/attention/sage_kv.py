"""SAGE-KV, arXiv 2503.08879."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..base import ScoreContext
from ..checks import check_count
from ..needs import Needs
from ..registry import register_policy
from .last_query import LastQueryAttention


@register_policy("sage_kv")
@dataclass(frozen=True)
class SageKV(LastQueryAttention):
    r"""Keeps what the newest query attends to, for each KV head separately.

    .. math:: s_t = a_{\text{newest},t}

    `a` is averaged over the query heads that share a KV head; arXiv 2503.08879 does not say how to combine them. The
    paper chooses once, at the end of the prompt, and afterwards only its window of recent tokens slides. `window` does
    the same: the chosen older tokens stay, and the last `window` tokens of the prompt and the tokens of the answer are
    evicted oldest first, in whole blocks (a block with a chosen token stays). The next forward of several tokens
    chooses again. With `window=0`, the default, the last query of each full block scores all tokens.

    Args:
        window: number of newest tokens of the prompt that are not part of the choice, at least two blocks; 0 = the
            choice is never final.

    Raises:
        ValueError: `window` is negative.
    """

    window: int = 0

    paper: ClassVar[str | None] = "2503.08879"

    def __post_init__(self) -> None:
        check_count("window", self.window)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """KV heads choose separately: with one choice for all, this would be TOVA. With a window, later queries do not
        count."""
        return replace(super().needs, heads="separate", observes_decode=not self.window)

    def attention(self, context: ScoreContext) -> Tensor:
        return context.statistics["attention"]

    def score(self, context: ScoreContext) -> Tensor:
        attention = self.attention(context)
        if not self.window or context.observed is None:
            return attention
        ends = context.observed.until[:, None, None]
        chosen = context.positions < ends - self.window
        # The choice is made when there are more tokens than the budget.
        fits = torch.as_tensor(context.positions.shape[-1] <= context.budget, device=ends.device)
        final = (fits | (context.seen[:, None, None] > ends)).expand_as(chosen)
        sliding = torch.where(final, context.positions.float(), torch.inf)
        return torch.where(chosen, attention.masked_fill(final, torch.inf), sliding)
