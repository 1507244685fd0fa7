"""A replacement that may take a while, and one that steps in."""

import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .base import Replacement, Resident
from .lru import Lru
from .registry import register_replacement


@dataclass
class _Clock:
    late: int = 0
    given_up: bool = False


@register_replacement("learned")
@dataclass(frozen=True)
class Timed(Replacement):
    """A learned score of each block, with a time budget; lru where it is exceeded (the idea of Cold-RL).

    The score is a weighted sum of how long ago the block was asked for (logarithm), how often (logarithm) and whether
    it is predicted not to be needed. The lowest goes first. What takes longer than the budget `patience` times in
    succession is not asked any more.

    Differences: Cold-RL (arXiv 2508.12485) learns by reinforcement which of 32 candidates goes; its reward judges each
    object by its own next hit, so that a score fitted to hits learns the same.

    Args:
        recency, frequency, unlikely: weights; those given were fitted to the embedded model by
            benchmarks/replacement.py.
        microseconds: time budget of one choice on the host.
        patience: how often it may be exceeded in succession.

    Attributes:
        clock: how it has kept to its budget, in all runs of this object.

    Raises:
        ValueError: no time, or no patience.
    """

    recency: float = -0.75
    frequency: float = 0.1
    unlikely: float = -0.97
    microseconds: float = 500.0
    patience: int = 3
    clock: _Clock = field(default_factory=_Clock, init=False, repr=False, compare=False)
    paper: ClassVar[str | None] = "2508.12485"

    def __post_init__(self) -> None:
        if not self.microseconds > 0 or self.patience < 1:
            raise ValueError(
                f"learned: microseconds must be positive and patience at least 1, got {self.microseconds!r} and "
                f"{self.patience!r}."
            )

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        clock = self.clock
        if clock.given_up:
            return Lru().ranks(resident, ids, now)
        start = time.perf_counter()
        score = self.score(resident, now)
        late = (time.perf_counter() - start) * 1e6 > self.microseconds
        clock.late = clock.late + 1 if late else 0
        clock.given_up = clock.late >= self.patience
        return Lru().ranks(resident, ids, now) if late else (score * 2**20).round().to(torch.int64)

    def score(self, resident: Resident, now: Tensor) -> Tensor:
        """`[B, S, F]` float32, high = keep."""
        since = (now[:, None, None] - resident.wanted_at).clamp_min(0).float().log1p()
        return (
            self.recency * since
            + self.frequency * resident.asked.float().log1p()
            + self.unlikely * resident.unlikely.float()
        )
