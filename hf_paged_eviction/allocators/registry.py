"""Allocators by name."""

from collections.abc import Callable
from typing import TypeVar

from ..naming import Kind, Registry
from .base import BudgetAllocator

AllocatorClass = TypeVar("AllocatorClass", bound=type[BudgetAllocator])

#: All of them.
ALLOCATORS: Registry[BudgetAllocator] = Registry(Kind("allocator", "allocators", "ada_kv(floor=0.5)"), BudgetAllocator)


def register_allocator(name: str) -> Callable[[AllocatorClass], AllocatorClass]:
    """Class decorator: make an allocator available as `allocator="name"`.

    A package makes its allocators known without being imported by entry points of the group
    `hf_paged_eviction.allocators`.

    Raises:
        TypeError: the class is not a `BudgetAllocator`.
        ValueError: the name belongs to another class.
    """
    return ALLOCATORS.register(name)


def available_allocators() -> tuple[str, ...]:
    """Names of all registered allocators, sorted."""
    return ALLOCATORS.names()


def make_allocator(allocator: str | BudgetAllocator) -> BudgetAllocator:
    """Return the allocator of that name or text; an object is returned as it is.

    Args:
        allocator: a name ("ada_kv") or a name with parameters ("ada_kv(floor=0.5)"). An object's `label` is such a
            text.

    Raises:
        ValueError: no allocator has that name or parameter, a value is out of range, or the text is no allocator.
        TypeError: neither a text nor an allocator object.
    """
    return ALLOCATORS.make(allocator)
