"""Does this cache do on a model what it promises? `verify(model)` runs the model and says so."""

from .checking import verify
from .distances import Distances
from .report import Check, Verification
from .rotation import Rotation, rotary_error

__all__ = ["Check", "Distances", "Rotation", "Verification", "rotary_error", "verify"]
