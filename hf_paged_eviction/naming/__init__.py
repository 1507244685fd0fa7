"""Names of policies, allocators and disposals: one parser, one registry, and entry points for plugins."""

from .named import Named
from .parsing import Kind, NameParseError, format_name
from .registry import Registry

__all__ = ["Kind", "NameParseError", "Named", "Registry", "format_name"]
