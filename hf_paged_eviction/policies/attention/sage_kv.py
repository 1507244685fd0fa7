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
    r"""The attention of the newest query, for each KV head on its own.

    .. math:: s_t = a_{\text{newest},t}

    At the end of a prompt this is the paper's choice, between the sinks and the recent tokens that the cache protects;
    the paper does not say how the query heads of a group are joined, here they are averaged. Afterwards the paper
    fixes the choice and lets only the recent window slide. That is `window`: what was chosen among older tokens stays,
    the prompt's last `window` tokens and those that come after them go, the oldest first, in whole blocks: a block of
    which a part was chosen stays. Another forward of several tokens chooses anew. Without a window the last query of
    each filled block judges all.

    Args:
        window: newest tokens of the prompt that are not part of the choice, two blocks at least; 0 = the choice is
            never final.

    Raises:
        ValueError: `window` is negative.
    """

    window: int = 0

    paper: ClassVar[str | None] = "2503.08879"

    def __post_init__(self) -> None:
        check_count("window", self.window)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Heads choose apart, or it would be TOVA. One choice looks at no later query."""
        return replace(super().needs, heads="separate", observes_decode=not self.window)

    def attention(self, context: ScoreContext) -> Tensor:
        return context.statistics["attention"]

    def score(self, context: ScoreContext) -> Tensor:
        attention = self.attention(context)
        if not self.window or context.observed is None:
            return attention
        ends = context.observed.until[:, None, None]
        chosen = context.positions < ends - self.window
        # The choice is made while more tokens are here than may stay.
        fits = torch.as_tensor(context.positions.shape[-1] <= context.budget, device=ends.device)
        final = (fits | (context.seen[:, None, None] > ends)).expand_as(chosen)
        sliding = torch.where(final, context.positions.float(), torch.inf)
        return torch.where(chosen, attention.masked_fill(final, torch.inf), sliding)
