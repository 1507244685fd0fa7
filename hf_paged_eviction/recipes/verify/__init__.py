"""Does this cache do on a model what it promises, and a policy what the cache relies on? `verify(model)` runs the
model, `check_policy(policy)` scores made-up tokens, and they say so."""

from .checking import verify
from .distances import Distances
from .policy import check_policy
from .precision import FewBits
from .report import Check, Verification
from .rotation import Rotation, rotary_error

__all__ = ["Check", "Distances", "FewBits", "Rotation", "Verification", "check_policy", "rotary_error", "verify"]
