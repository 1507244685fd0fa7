"""What becomes of the tokens that leave a layer."""

from .base import Asked, Disposal, Held, Outlet, Site, Surroundings
from .drop import Drop
from .recall import Recall
from .registry import available_disposals, make_disposal, register_disposal

__all__ = [
    "Asked",
    "Disposal",
    "Drop",
    "Held",
    "Outlet",
    "Recall",
    "Site",
    "Surroundings",
    "available_disposals",
    "make_disposal",
    "register_disposal",
]
