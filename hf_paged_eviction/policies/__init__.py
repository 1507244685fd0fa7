"""Eviction policies: what a cached token is worth. One file each."""

from .base import EvictionPolicy, ScoreContext, Statistics
from .h2o import H2O
from .key_norm import KeyNorm
from .keydiff import KeyDiff
from .paged_eviction import PagedEviction
from .random import Random
from .recency import Recency
from .registry import available_policies, make_policy, register_policy
from .streaming_llm import StreamingLLM
from .value_norm import ValueNorm

__all__ = [
    "H2O",
    "EvictionPolicy",
    "KeyDiff",
    "KeyNorm",
    "PagedEviction",
    "Random",
    "Recency",
    "ScoreContext",
    "Statistics",
    "StreamingLLM",
    "ValueNorm",
    "available_policies",
    "make_policy",
    "register_policy",
]
