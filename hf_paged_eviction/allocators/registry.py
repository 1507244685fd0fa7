"""Allocators by name."""

from ..naming import Kind, Registry
from .base import BudgetAllocator

_MODULES = {
    "ada_kv": "ada_kv",
    "cake": "cake",
    "d2o": "d2o",
    "first_prompt": "first_prompt",
    "heads": "heads",
    "pyramid": "pyramid",
    "uniform": "uniform",
}

#: The registry of allocators.
ALLOCATORS: Registry[BudgetAllocator] = Registry(
    Kind("allocator", "allocators", "ada_kv(floor=0.5)"), BudgetAllocator, modules=_MODULES
)
register_allocator, available_allocators, make_allocator = ALLOCATORS.register, ALLOCATORS.names, ALLOCATORS.make
