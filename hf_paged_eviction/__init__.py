"""Long contexts in a fixed amount of KV memory, for Hugging Face transformers.

>>> cache = PagedEvictionCache(model.config, budget=1024)  # doctest: +SKIP
>>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
"""

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

__version__ = "0.1.0"

__all__ = [
    "CacheStats",
    "EvictionPolicy",
    "LayerStats",
    "PagedEvictionCache",
    "ScoreContext",
    "StoragePool",
    "Verification",
    "__version__",
    "available_allocators",
    "available_modifiers",
    "available_policies",
    "make_allocator",
    "make_policy",
    "paged_encoder_decoder_cache",
    "register_policy",
    "verify",
]
