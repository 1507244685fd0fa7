"""Eviction policies: what a cached token is worth. One file each."""

from .attention_policy import AttentionPolicy
from .base import EvictionPolicy, QueryCount, ScoreContext, Statistics
from .modifier import Modifier
from .needs import Needs
from .registry import available_modifiers, available_policies, make_policy, register_policy

__all__ = [
    "AttentionPolicy",
    "EvictionPolicy",
    "Modifier",
    "Needs",
    "QueryCount",
    "ScoreContext",
    "Statistics",
    "available_modifiers",
    "available_policies",
    "make_policy",
    "register_policy",
]
