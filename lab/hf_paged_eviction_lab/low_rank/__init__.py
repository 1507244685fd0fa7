"""Keys and values as a few coefficients of directions that were fitted to a model."""

from .low_rank import LowRank

__all__ = ["LowRank"]
