"""Budget allocators: how many tokens each layer and head may hold. One file each."""

from .base import BudgetAllocator, FixedAllocator, HeadAllocator, LayerAllocator
from .heads import Heads
from .registry import available_allocators, make_allocator, register_allocator
from .share import share_out
from .uniform import Uniform

__all__ = [
    "BudgetAllocator",
    "FixedAllocator",
    "HeadAllocator",
    "Heads",
    "LayerAllocator",
    "Uniform",
    "available_allocators",
    "make_allocator",
    "register_allocator",
    "share_out",
]
