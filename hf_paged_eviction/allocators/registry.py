"""Allocators by name."""

from collections.abc import Callable
from typing import TypeVar

from .base import BudgetAllocator

AllocatorClass = TypeVar("AllocatorClass", bound=type[BudgetAllocator])

_ALLOCATORS: dict[str, type[BudgetAllocator]] = {}


def register_allocator(name: str) -> Callable[[AllocatorClass], AllocatorClass]:
    """Class decorator: make an allocator available as `allocator="name"`.

    Raises:
        TypeError: the class is not a `BudgetAllocator`.
        ValueError: the name belongs to another class.
    """

    def register(cls: AllocatorClass) -> AllocatorClass:
        if not (isinstance(cls, type) and issubclass(cls, BudgetAllocator)):
            raise TypeError(f"@register_allocator({name!r}) needs a subclass of BudgetAllocator, got {cls!r}.")
        taken = _ALLOCATORS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"The allocator name {name!r} is taken by {taken.__module__}.{taken.__qualname__}.")
        cls.name = name
        _ALLOCATORS[name] = cls
        return cls

    return register


def available_allocators() -> tuple[str, ...]:
    """Names of all registered allocators, sorted."""
    return tuple(sorted(_ALLOCATORS))


def make_allocator(allocator: str | BudgetAllocator) -> BudgetAllocator:
    """Return the allocator of that name with its default parameters; an object is returned as it is.

    Raises:
        ValueError: no allocator has that name.
        TypeError: neither a name nor an allocator object.
    """
    if isinstance(allocator, BudgetAllocator):
        return allocator
    if not isinstance(allocator, str):
        raise TypeError(f"allocator must be a name or a BudgetAllocator object (not a class), got {allocator!r}.")
    allocator = allocator.strip()
    if allocator not in _ALLOCATORS:
        raise ValueError(f"Unknown allocator {allocator!r}. Available: {', '.join(available_allocators())}.")
    return _ALLOCATORS[allocator]()
