"""Least frequently used."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident
from .registry import register_replacement


@register_replacement("lfu")
@dataclass(frozen=True)
class Lfu(Replacement):
    """Evicts the block that was needed least often since it came; of several, the one whose last use is longest ago."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return (resident.asked << 32) + resident.wanted_at
