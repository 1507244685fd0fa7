"""Tokens that leave are kept on in few bits."""

from .demote import Demote
from .outlet import DemoteOutlet

__all__ = ["Demote", "DemoteOutlet"]
