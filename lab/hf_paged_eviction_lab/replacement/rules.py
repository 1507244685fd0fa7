"""Replacements that need no predictions."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident, scramble


@dataclass(frozen=True)
class Lru(Replacement):
    """Evicts the block whose last use is longest ago."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return resident.wanted_at


@dataclass(frozen=True)
class Lfu(Replacement):
    """Evicts the block that was needed least often since it came; of several, the one whose last use is longest ago."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return (resident.asked << 32) + resident.wanted_at


@dataclass(frozen=True)
class Random(Replacement):
    """Evicts a random block, by a hash of block and moment."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return scramble(ids, now[:, None, None])
