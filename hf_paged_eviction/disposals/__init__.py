"""What becomes of the tokens that leave a layer."""

from .base import Asked, Disposal, Held, Outlet, Site, Surroundings
from .demote import Demote
from .drop import Drop
from .fold import Fold
from .merge import Merge
from .recall import Recall
from .registry import available_disposals, make_disposal, register_disposal

__all__ = [
    "Asked",
    "Demote",
    "Disposal",
    "Drop",
    "Fold",
    "Held",
    "Merge",
    "Outlet",
    "Recall",
    "Site",
    "Surroundings",
    "available_disposals",
    "make_disposal",
    "register_disposal",
]
