"""Least recently used."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident
from .registry import register_replacement


@register_replacement("lru")
@dataclass(frozen=True)
class Lru(Replacement):
    """Evicts the block whose last use is longest ago."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return resident.wanted_at
