"""Eviction in transformers' continuous batching: a budget for every request, without preemption."""

from .batching import PagedBatching, paged_batching
from .contract import TESTED, UnsupportedTransformersError, moved

__all__ = [
    "TESTED",
    "PagedBatching",
    "UnsupportedTransformersError",
    "moved",
    "paged_batching",
]
