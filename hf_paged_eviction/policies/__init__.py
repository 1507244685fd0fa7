"""Eviction policies: what a cached token is worth. One file each."""

from ..store.marks import MarkSource
from .attention.attention_mean import AttentionMean
from .attention.cake import Cake
from .attention.compactor import Compactor
from .attention.expected_attention import ExpectedAttention
from .attention.h2o import H2O
from .attention.hits import LFA, LFU, LRA, LRU, Scissorhands
from .attention.kvzip import KVzip
from .attention.lazy_eviction import LazyEviction
from .attention.r_kv import RKV
from .attention.roco import RoCo
from .attention.sage_kv import SageKV
from .attention.snapkv import SnapKV
from .attention.tova import TOVA
from .attention_policy import AttentionPolicy
from .base import EvictionPolicy, QueryCount, ScoreContext, Statistics
from .fitted.calibrated import Calibrated
from .fitted.observed import Observed
from .fitted.self_calibrated import SelfCalibrated
from .keys.key_norm import KeyNorm
from .keys.keydiff import KeyDiff
from .keys.lagkv import LagKV
from .keys.leverage import Leverage
from .keys.paged_eviction import PagedEviction
from .keys.random import Random
from .keys.recency import Recency
from .keys.streaming_llm import StreamingLLM
from .keys.value_norm import ValueNorm
from .modifier import Modifier
from .modifiers.adaptive import Adaptive
from .modifiers.caote import Caote
from .modifiers.graphkv import GraphKV
from .modifiers.hybrid import Hybrid
from .modifiers.vase import Vase
from .needs import Needs
from .registry import (
    available_modifiers,
    available_policies,
    available_policy_files,
    make_policy,
    register_policy,
)

__all__ = [
    "H2O",
    "LFA",
    "LFU",
    "LRA",
    "LRU",
    "RKV",
    "TOVA",
    "Adaptive",
    "AttentionMean",
    "AttentionPolicy",
    "Cake",
    "Calibrated",
    "Caote",
    "Compactor",
    "EvictionPolicy",
    "ExpectedAttention",
    "GraphKV",
    "Hybrid",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "LazyEviction",
    "Leverage",
    "MarkSource",
    "Modifier",
    "Needs",
    "Observed",
    "PagedEviction",
    "QueryCount",
    "Random",
    "Recency",
    "RoCo",
    "SageKV",
    "Scissorhands",
    "ScoreContext",
    "SelfCalibrated",
    "SnapKV",
    "Statistics",
    "StreamingLLM",
    "ValueNorm",
    "Vase",
    "available_modifiers",
    "available_policies",
    "available_policy_files",
    "make_policy",
    "register_policy",
]
