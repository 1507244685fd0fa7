"""Replacements by name."""

from ...naming import Kind, Registry
from .base import Replacement

#: The registry of replacements.
REPLACEMENTS: Registry[Replacement] = Registry(
    Kind("replacement", "replacements", "lru"),
    Replacement,  # type: ignore[type-abstract]
)
register_replacement, available_replacements = REPLACEMENTS.register, REPLACEMENTS.names
make_replacement = REPLACEMENTS.make
