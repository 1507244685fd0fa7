"""The same for every layer."""

from dataclasses import dataclass

from .base import FixedAllocator
from .registry import register_allocator


@register_allocator("uniform")
@dataclass(frozen=True)
class Uniform(FixedAllocator):
    """Equal shares."""

    def weights(self, layers: int, budget: int) -> list[float]:
        return [1.0] * layers
