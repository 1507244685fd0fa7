"""Eviction inside transformers' continuous batching: a bound for every request, and nobody is preempted."""

from .context import PagedBatching, paged_batching
from .contract import TESTED, UnsupportedTransformersError, moved
from .stats import BatchingStats, RequestStats

__all__ = [
    "TESTED",
    "BatchingStats",
    "PagedBatching",
    "RequestStats",
    "UnsupportedTransformersError",
    "moved",
    "paged_batching",
]
