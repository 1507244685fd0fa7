"""A replacement with fitted weights, and a time limit for it."""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Replacement, Resident
from .lru import Lru
from .registry import register_replacement


@register_replacement("learned")
@dataclass(frozen=True)
class Learned(Replacement):
    """A learned score of each block (the idea of Cold-RL).

    The score is a weighted sum of three numbers: the logarithm of the time since the block was needed, the logarithm of
    how often it was, and whether it is predicted not to be needed. The block with the lowest score goes first.

    With a time limit, "lru" decides whenever the score took longer; after `patience` such times in a row a layer no
    longer computes the score. The result then depends on how busy the machine is, so there is no limit by default.

    Cold-RL (arXiv 2508.12485) learns by reinforcement which of 32 candidates goes. Its reward judges each object by its
    own next hit, so a score fitted to hits learns the same.

    Args:
        recency, frequency, unlikely: weights. The defaults were fitted to traces of the embedded model.
        microseconds: limit of the host's time for one choice; None = no limit.
        patience: how many times in a row the limit may be exceeded.

    Raises:
        ValueError: `microseconds` or `patience` is not above 0.
    """

    recency: float = -0.75
    frequency: float = 0.1
    unlikely: float = -0.97
    microseconds: float | None = None
    patience: int = 3
    paper: ClassVar[str | None] = "2508.12485"

    def __post_init__(self) -> None:
        if (self.microseconds is not None and not self.microseconds > 0) or self.patience < 1:
            raise ValueError(
                f"learned: microseconds must be positive and patience at least 1, got {self.microseconds!r} and "
                f"{self.patience!r}."
            )

    def of_layer(self) -> Replacement:
        """See `Replacement.of_layer`."""
        return self if self.microseconds is None else _Limited(self, self.microseconds)

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


class _Limited(Replacement):
    """`Learned` in one layer, with its clock."""

    def __init__(self, learned: Learned, microseconds: float) -> None:
        self._learned, self._microseconds, self._late = learned, microseconds, 0

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        if self._late < self._learned.patience:
            start = time.perf_counter()
            ranks = self._learned.ranks(resident, ids, now)
            if (time.perf_counter() - start) * 1e6 <= self._microseconds:
                self._late = 0
                return ranks
            self._late += 1
        return Lru().ranks(resident, ids, now)
