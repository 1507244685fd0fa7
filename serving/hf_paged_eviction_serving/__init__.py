"""Eviction in transformers' continuous batching: a budget for every request, without preemption."""

from .batching import PagedBatching, paged_batching
from .contract import TESTED, UnsupportedTransformersError, moved
from .sampler import Sampler, Sampling

__all__ = [
    "TESTED",
    "PagedBatching",
    "Sampler",
    "Sampling",
    "UnsupportedTransformersError",
    "moved",
    "paged_batching",
]
