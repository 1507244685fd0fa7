"""Eviction policies: what a cached token is worth. One file each."""

from .adaptive import Adaptive
from .attention_mean import AttentionMean
from .attention_policy import AttentionPolicy
from .base import EvictionPolicy, QueryCount, ScoreContext, Statistics
from .cake import Cake
from .calibrated import Calibrated
from .caote import Caote
from .compactor import Compactor
from .expected_attention import ExpectedAttention
from .gate import Gate
from .graphkv import GraphKV
from .h2o import H2O
from .hits import LFA, LFU, LRA, LRU, Scissorhands
from .hybrid import Hybrid
from .key_norm import KeyNorm
from .keydiff import KeyDiff
from .kvzip import KVzip
from .lagkv import LagKV
from .lazy_eviction import LazyEviction
from .leverage import Leverage
from .modifier import Modifier
from .needs import Needs
from .paged_eviction import PagedEviction
from .r_kv import RKV
from .random import Random
from .recency import Recency
from .registry import (
    available_modifiers,
    available_policies,
    available_policy_files,
    make_policy,
    register_policy,
)
from .roco import RoCo
from .sage_kv import SageKV
from .self_calibrated import SelfCalibrated
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA
from .value_norm import ValueNorm

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
    "Gate",
    "GraphKV",
    "Hybrid",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "LagKV",
    "LazyEviction",
    "Leverage",
    "Modifier",
    "Needs",
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
    "available_modifiers",
    "available_policies",
    "available_policy_files",
    "make_policy",
    "register_policy",
]
