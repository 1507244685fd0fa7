"""Which blocks a query needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ranking import DROP, rank_keys


@dataclass(frozen=True)
class Choice:
    """What a query asked for.

    Attributes:
        chosen: `[B, S, N]` bool, the blocks that it needs.
        likely: `[B, S, N]` bool, those among twice as many.
        ids: `[B, S, K]` int64, the former in order, the best first.
        next: `[B, S, n]` int64, those after them, which the next query may ask for; -1 where there are none.
    """

    chosen: Tensor
    likely: Tensor
    ids: Tensor
    next: Tensor

    @classmethod
    def of(cls, scores: Tensor, allowed: Tensor, count: int, ahead: int) -> "Choice":
        """The best of the blocks.

        Args:
            scores: `[B, S, N]` float32.
            allowed: `[B, S, N]` bool, which of them may be chosen.
            count: how many.
            ahead: how many more for `next`.
        """
        blocks = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        keys = rank_keys(scores, blocks, allowed, absolute_noise=True)
        best, ids = keys.topk(min(count + max(count, ahead), keys.shape[-1]), dim=-1)
        chosen, likely = (
            torch.zeros_like(allowed).scatter(-1, ids[..., :most], best[..., :most] > DROP)
            for most in (count, 2 * count)
        )
        after = slice(count, count + ahead)
        return cls(chosen, likely, ids[..., :count], ids[..., after].masked_fill(best[..., after] == DROP, -1))
