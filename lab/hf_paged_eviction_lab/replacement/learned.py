"""A replacement with fitted weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Replacement, Resident


@dataclass(frozen=True)
class Learned(Replacement):
    """A learned score of each block (the idea of Cold-RL).

    The score is a weighted sum of three numbers: the logarithm of the time since the block was needed, the logarithm of
    how often it was, and whether it is predicted not to be needed. The block with the lowest score goes first.

    Cold-RL (arXiv 2508.12485) learns by reinforcement which of 32 candidates goes. Its reward judges each object by its
    own next hit, so a score fitted to hits learns the same.

    Args:
        recency, frequency, unlikely: weights. The defaults were fitted to traces of the embedded model.
    """

    recency: float = -0.75
    frequency: float = 0.1
    unlikely: float = -0.97

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return (self.score(resident, now) * 2**20).round().to(torch.int64)

    def score(self, resident: Resident, now: Tensor) -> Tensor:
        """`[B, S, F]` float32, high = keep."""
        since = (now[:, None, None] - resident.wanted_at).clamp_min(0).float().log1p()
        return (
            self.recency * since
            + self.frequency * resident.asked.float().log1p()
            + self.unlikely * resident.unlikely.float()
        )
