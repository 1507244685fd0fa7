"""What becomes of the tokens that leave a layer."""

from .base import Disposal, Held, Outlet
from .drop import Drop
from .registry import available_disposals, make_disposal, register_disposal

__all__ = ["Disposal", "Drop", "Held", "Outlet", "available_disposals", "make_disposal", "register_disposal"]
