"""Tokens that leave go into others that stay."""

from .merge import Merge
from .outlet import MergeOutlet

__all__ = ["Merge", "MergeOutlet"]
