"""Eviction in transformers' continuous batching: a budget for every request, without preemption."""

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
