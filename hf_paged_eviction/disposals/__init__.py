"""Disposals: what happens to evicted tokens."""

from .base import AttentionCall, Disposal, DisposalContext, Drop, EvictionAction, Held, Site
from .registry import available_disposals, make_disposal, register_disposal

__all__ = [
    "AttentionCall",
    "Disposal",
    "DisposalContext",
    "Drop",
    "EvictionAction",
    "Held",
    "Site",
    "available_disposals",
    "make_disposal",
    "register_disposal",
]
