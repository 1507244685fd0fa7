"""Check the promises of this cache on a model: `verify(model)`."""

from .checking import verify
from .report import Check, Verification

__all__ = ["Check", "Verification", "verify"]
