"""What becomes of the tokens that leave a layer."""

from .base import Asked, Disposal, EvictionAction, Held, Site, Surroundings
from .drop import Drop
from .recall import Recall
from .registry import available_disposals, make_disposal, register_disposal

__all__ = [
    "Asked",
    "Disposal",
    "Drop",
    "EvictionAction",
    "Held",
    "Recall",
    "Site",
    "Surroundings",
    "available_disposals",
    "make_disposal",
    "register_disposal",
]
