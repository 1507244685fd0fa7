"""The same for every layer."""

from dataclasses import dataclass

from .base import FixedAllocator
from .registry import register_allocator


@register_allocator("uniform")
@dataclass(frozen=True)
class Uniform(FixedAllocator):
    r"""Gives every layer the same budget.

    .. math:: b_\ell = \frac{\text{total}}{\text{layers}}
    """

    def weights(self, layers: int, budget: int) -> list[float]:
        return [1.0] * layers
