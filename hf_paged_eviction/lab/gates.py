"""Where gates were before they left the lab; goes in 0.2."""

import warnings
from importlib import import_module
from typing import Any

_POLICIES, _LEARNED = "hf_paged_eviction.policies", "hf_paged_eviction.learned.gates"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    module = _POLICIES if name == "Gate" else _LEARNED
    found = getattr(import_module(module), name)
    warnings.warn(f"{__name__}.{name} is {module}.{name} now; the old name goes in 0.2.", DeprecationWarning, 2)
    return found
