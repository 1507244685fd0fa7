"""All that the package offers under its own name; `hf_paged_eviction` takes it from here when it is first needed."""

from .allocators import available_allocators, make_allocator
from .cache import PagedEvictionCache
from .disposals import Disposal, available_disposals, make_disposal
from .policies import (
    EvictionPolicy,
    Needs,
    ScoreContext,
    available_modifiers,
    available_policies,
    make_policy,
    register_policy,
)
from .recipes.encoder_decoder import paged_encoder_decoder_cache
from .recipes.probe import compress_by_probe
from .recipes.verification import Verification, check_policy, verify
from .stats import CacheStats, LayerStats
from .store.pool import StoragePool

__all__ = [
    "CacheStats",
    "Disposal",
    "EvictionPolicy",
    "LayerStats",
    "Needs",
    "PagedEvictionCache",
    "ScoreContext",
    "StoragePool",
    "Verification",
    "available_allocators",
    "available_disposals",
    "available_modifiers",
    "available_policies",
    "check_policy",
    "compress_by_probe",
    "make_allocator",
    "make_disposal",
    "make_policy",
    "paged_encoder_decoder_cache",
    "register_policy",
    "verify",
]
