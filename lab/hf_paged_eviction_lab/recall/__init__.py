"""Recall: bring evicted blocks back when a query needs them."""

from .recall import Recall, RecallAction

__all__ = ["Recall", "RecallAction"]
