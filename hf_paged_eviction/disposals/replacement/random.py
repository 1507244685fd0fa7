"""Any block."""

from dataclasses import dataclass

from torch import Tensor

from .base import Replacement, Resident, scramble
from .registry import register_replacement


@register_replacement("random")
@dataclass(frozen=True)
class Random(Replacement):
    """A number drawn from block and moment says which block goes."""

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        return scramble(ids, now[:, None, None])
