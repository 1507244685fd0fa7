"""Recall: bring evicted blocks back when a query needs them."""

from .recall import Recall, RecallAction, Traffic, traffic

__all__ = ["Recall", "RecallAction", "Traffic", "traffic"]
