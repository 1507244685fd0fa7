"""Recall: bring evicted blocks back when a query needs them."""

from .action import RecallAction
from .recall import Recall

__all__ = ["Recall", "RecallAction"]
