"""Few tokens whose values say what all did: a part of Attention Matching (arXiv 2602.16284)."""

from .matching import compress_by_matching

__all__ = ["compress_by_matching"]
