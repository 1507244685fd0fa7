"""Things by name: policies, allocators and what else is written as text. One parsed, one registry, one way in for
other packages."""

from .named import Named
from .parsing import Kind, NameParseError, format_name
from .registry import Registry

__all__ = ["Kind", "NameParseError", "Named", "Registry", "format_name"]
