"""Tokens that leave are kept on in few bits."""

from .action import DemoteAction
from .demote import Demote

__all__ = ["Demote", "DemoteAction"]
