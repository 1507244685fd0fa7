"""Eviction inside transformers' continuous batching: a bound for every request, and nobody is preempted."""

from .context import PagedBatching, paged_batching
from .contract import SUPPORTED, UnsupportedTransformersError
from .stats import BatchingStats, RequestStats

__all__ = [
    "SUPPORTED",
    "BatchingStats",
    "PagedBatching",
    "RequestStats",
    "UnsupportedTransformersError",
    "paged_batching",
]
