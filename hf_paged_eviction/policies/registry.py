"""Policies by name."""

from ..naming import Kind, Registry
from .base import EvictionPolicy
from .modifier import Modifier

_MODULES = {
    "adaptive": "modifiers.adaptive",
    "attention_mean": "attention.attention_mean",
    "cake": "attention.cake",
    "calibrated": "fitted.calibrated",
    "caote": "modifiers.caote",
    "compactor": "attention.compactor",
    "expected_attention": "attention.expected_attention",
    "graphkv": "modifiers.graphkv",
    "h2o": "attention.h2o",
    "hybrid": "modifiers.hybrid",
    "key_norm": "keys.key_norm",
    "keydiff": "keys.keydiff",
    "kvzip": "attention.kvzip",
    "lagkv": "keys.lagkv",
    "lazy_eviction": "attention.lazy_eviction",
    "leverage": "keys.leverage",
    "lfa": "attention.hits",
    "lfu": "attention.hits",
    "lra": "attention.hits",
    "lru": "attention.hits",
    "observed": "fitted.observed",
    "paged_eviction": "keys.paged_eviction",
    "r_kv": "attention.r_kv",
    "random": "keys.random",
    "recency": "keys.recency",
    "roco": "attention.roco",
    "sage_kv": "attention.sage_kv",
    "scissorhands": "attention.hits",
    "snapkv": "attention.snapkv",
    "streaming_llm": "keys.streaming_llm",
    "tova": "attention.tova",
    "value_norm": "keys.value_norm",
    "vase": "modifiers.vase",
}

#: The registry of policies.
POLICIES: Registry[EvictionPolicy] = Registry(
    Kind("policy", "policies", "snapkv(window=16)", "caote(h2o)"),
    EvictionPolicy,  # type: ignore[type-abstract]
    Modifier,
    _MODULES,
)
register_policy, make_policy = POLICIES.register, POLICIES.make
available_policies, available_modifiers = POLICIES.names, POLICIES.modifiers
