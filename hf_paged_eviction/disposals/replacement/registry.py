"""Replacements by name."""

from collections.abc import Callable
from typing import TypeVar

from ...naming import Kind, Registry
from .base import Replacement

ReplacementClass = TypeVar("ReplacementClass", bound=type[Replacement])

#: All of them.
REPLACEMENTS: Registry[Replacement] = Registry(
    Kind("replacement", "replacements", "lru"),
    Replacement,  # type: ignore[type-abstract]
)


def register_replacement(name: str) -> Callable[[ReplacementClass], ReplacementClass]:
    """Class decorator: make a replacement available as `recall(replacement=name)`.

    Raises:
        TypeError: the class is not a `Replacement`.
        ValueError: the name belongs to another class.
    """
    return REPLACEMENTS.register(name)


def available_replacements() -> tuple[str, ...]:
    """Names of all registered replacements, sorted."""
    return REPLACEMENTS.names()


def make_replacement(replacement: str | Replacement) -> Replacement:
    """Return the replacement of that name; an object is returned as it is.

    Raises:
        ValueError: nothing has that name or parameter.
        TypeError: neither a text nor a replacement.
    """
    return REPLACEMENTS.make(replacement)
