"""Least recently used."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident
from .registry import register_replacement


@register_replacement("lru")
@dataclass(frozen=True)
class Lru(Replacement):
    """The block that was asked for longest ago goes first."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return resident.wanted_at
