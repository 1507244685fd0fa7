"""Random replacement."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident, scramble
from .registry import register_replacement


@register_replacement("random")
@dataclass(frozen=True)
class Random(Replacement):
    """Evicts a random block, by a hash of block and moment."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return scramble(ids, now[:, None, None])
