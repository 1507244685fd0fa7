"""Does this cache do on a model what it promises? `verify(model)` runs the model and says so."""

from .checking import verify
from .report import Check, Verdict, Verification

__all__ = ["Check", "Verdict", "Verification", "verify"]
