"""Blocks that were evicted are brought back when a query needs them."""

from .outlet import RecallOutlet
from .recall import Recall

__all__ = ["Recall", "RecallOutlet"]
