"""Does this cache do on a model what it promises? `verify(model)` runs the model and says so."""

from .checking import verify
from .report import Check, Verification

__all__ = ["Check", "Verification", "verify"]
