"""Queries that wait before they attend (Attendre, arXiv 2401.04881)."""

from .delayed import delayed_attention
from .memory import QUERY_MEMORY, query_memory

__all__ = ["QUERY_MEMORY", "delayed_attention", "query_memory"]
