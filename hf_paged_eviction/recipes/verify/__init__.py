"""Does this cache do on a model what it promises? `verify(model)` runs the model and says so."""

from .checking import verify
from .distances import Distances
from .precision import FewBits
from .report import Check, Verification
from .rotation import Rotation, rotary_error

__all__ = ["Check", "Distances", "FewBits", "Rotation", "Verification", "rotary_error", "verify"]
