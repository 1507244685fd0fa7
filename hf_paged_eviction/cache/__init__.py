"""The cache: what transformers calls, and caches in files."""

from .cache import PagedEvictionCache

__all__ = ["PagedEvictionCache"]
