"""Tokens that leave are kept on in few bits."""

from .action import DemoteAction
from .demote import Demote, demoted_tokens

__all__ = ["Demote", "DemoteAction", "demoted_tokens"]
