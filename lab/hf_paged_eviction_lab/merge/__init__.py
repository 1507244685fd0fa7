"""Tokens that leave go into others that stay."""

from .action import MergeAction
from .merge import Merge

__all__ = ["Merge", "MergeAction"]
