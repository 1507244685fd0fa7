"""The blocks that a query needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ranking import DROP, rank_keys


@dataclass(frozen=True)
class Choice:
    """The blocks that a query chose.

    Attributes:
        chosen: `[B, S, N]` bool, the best blocks.
        ids: `[B, S, K]` int64, the chosen blocks, best first.
        next: `[B, S, n]` int64, the next best blocks, for prefetching; -1 = none.
    """

    chosen: Tensor
    ids: Tensor
    next: Tensor

    @classmethod
    def of(cls, scores: Tensor, allowed: Tensor, count: int, ahead: int) -> "Choice":
        """Choose the best blocks.

        Args:
            scores: `[B, S, N]` float32.
            allowed: `[B, S, N]` bool, which of them may be chosen.
            count: number of blocks to choose.
            ahead: number of blocks in `next`.
        """
        blocks = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        keys = rank_keys(scores, blocks, allowed, absolute_noise=True)
        best, ids = keys.topk(min(count + ahead, keys.shape[-1]), dim=-1)
        chosen = torch.zeros_like(allowed).scatter(-1, ids[..., :count], best[..., :count] > DROP)
        after = slice(count, count + ahead)
        return cls(chosen, ids[..., :count], ids[..., after].masked_fill(best[..., after] == DROP, -1))
