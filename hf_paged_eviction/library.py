"""The public names of the package, for type checkers: `hf_paged_eviction` loads each on first use."""

from .allocators import available_allocators, make_allocator
from .cache import PagedEvictionCache
from .disposals import Disposal, available_disposals, make_disposal
from .integration.roles import spans_of_roles
from .integration.weights import register_weights, weights_digest
from .layer.stats import CacheStats, LayerStats
from .options.cache_options import CacheOptions
from .planning import Plan, plan
from .policies import (
    EvictionPolicy,
    Needs,
    ScoreContext,
    available_modifiers,
    available_policies,
    make_policy,
    register_policy,
)
from .preparing.prepare import prepare
from .preparing.profile import Profile
from .recipes.probe import compress_by_probe
from .recipes.questions import ask
from .recipes.verify import Verification, verify

__all__ = [
    "CacheOptions",
    "CacheStats",
    "Disposal",
    "EvictionPolicy",
    "LayerStats",
    "Needs",
    "PagedEvictionCache",
    "Plan",
    "Profile",
    "ScoreContext",
    "Verification",
    "ask",
    "available_allocators",
    "available_disposals",
    "available_modifiers",
    "available_policies",
    "compress_by_probe",
    "make_allocator",
    "make_disposal",
    "make_policy",
    "plan",
    "prepare",
    "register_policy",
    "register_weights",
    "spans_of_roles",
    "verify",
    "weights_digest",
]
