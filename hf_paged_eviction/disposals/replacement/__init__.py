"""Which block in the slots makes room for one that comes back."""

from .base import Replacement, Resident
from .belady import Belady
from .lfu import Lfu
from .lru import Lru
from .marking import Flush, Mark0, MarkPredict
from .random import Random
from .registry import available_replacements, make_replacement, register_replacement
from .timed import Timed

__all__ = [
    "Belady",
    "Flush",
    "Lfu",
    "Lru",
    "Mark0",
    "MarkPredict",
    "Random",
    "Replacement",
    "Resident",
    "Timed",
    "available_replacements",
    "make_replacement",
    "register_replacement",
]
