"""All that the package offers under its own name; `hf_paged_eviction` takes it from here when it is first needed."""

from .allocators import available_allocators, make_allocator
from .cache import PagedEvictionCache
from .encoder_decoder import paged_encoder_decoder_cache
from .policies import (
    EvictionPolicy,
    ScoreContext,
    available_modifiers,
    available_policies,
    make_policy,
    register_policy,
)
from .stats import CacheStats, LayerStats
from .storage_pool import StoragePool
from .verification import Verification, verify

__all__ = [
    "CacheStats",
    "EvictionPolicy",
    "LayerStats",
    "PagedEvictionCache",
    "ScoreContext",
    "StoragePool",
    "Verification",
    "available_allocators",
    "available_modifiers",
    "available_policies",
    "make_allocator",
    "make_policy",
    "paged_encoder_decoder_cache",
    "register_policy",
    "verify",
]
