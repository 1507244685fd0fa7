"""Things by name: policies, allocators and what else is written as text. One spelling, one registry, one way in for
other packages."""

from .named import Named
from .registry import Registry
from .spelling import Kind, SpellingError, spell

__all__ = ["Kind", "Named", "Registry", "SpellingError", "spell"]
