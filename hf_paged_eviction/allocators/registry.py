"""Allocators by name."""

from ..naming import Kind, Registry
from .base import BudgetAllocator

#: The registry of allocators.
ALLOCATORS: Registry[BudgetAllocator] = Registry(Kind("allocator", "allocators", "ada_kv(floor=0.5)"), BudgetAllocator)
register_allocator, available_allocators, make_allocator = ALLOCATORS.register, ALLOCATORS.names, ALLOCATORS.make
