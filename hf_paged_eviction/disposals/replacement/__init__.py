"""Replacements: which block in the slots makes room for one that comes back."""

from .base import Replacement, Resident
from .belady import Belady
from .learned import Learned
from .lfu import Lfu
from .lru import Lru
from .marking import Flush, Mark0, MarkPredict
from .random import Random
from .registry import available_replacements, make_replacement, register_replacement

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
    "available_replacements",
    "make_replacement",
    "register_replacement",
]
