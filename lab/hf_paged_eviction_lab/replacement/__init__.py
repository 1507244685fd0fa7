"""Replacements: which of the blocks that are held makes room for one that is needed, on recorded traces."""

from .base import Replacement, Resident
from .belady import Belady
from .learned import Learned
from .marking import Flush, Mark0, MarkPredict
from .rules import Lfu, Lru, Random
from .simulation import faults

__all__ = [
    "Belady",
    "Flush",
    "Learned",
    "Lfu",
    "Lru",
    "Mark0",
    "MarkPredict",
    "Random",
    "Replacement",
    "Resident",
    "faults",
]
