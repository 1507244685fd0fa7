"""Long contexts in a fixed amount of KV memory, for Hugging Face transformers.

>>> cache = PagedEvictionCache(model.config, budget=1024)  # doctest: +SKIP
>>> model.generate(**inputs, cache=cache)  # doctest: +SKIP

The first access to a name of the package loads torch and transformers, and registers the attention implementation
"paged_eviction" with transformers. `import hf_paged_eviction` alone does neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__ as __version__

#: Where the public names are. `library.py` lists them for type checkers.
_MODULES = {
    "CacheOptions": "options.cache_options",
    "CacheStats": "layer.stats",
    "Disposal": "disposals",
    "EvictionPolicy": "policies",
    "LayerStats": "layer.stats",
    "Needs": "policies",
    "PagedEvictionCache": "cache",
    "Plan": "planning",
    "Profile": "preparing.profile",
    "ScoreContext": "policies",
    "Verification": "recipes.verify",
    "ask": "recipes.questions",
    "available_allocators": "allocators",
    "available_disposals": "disposals",
    "available_modifiers": "policies",
    "available_policies": "policies",
    "compress_by_probe": "recipes.probe",
    "make_allocator": "allocators",
    "make_disposal": "disposals",
    "make_policy": "policies",
    "plan": "planning",
    "prepare": "preparing.prepare",
    "register_policy": "policies",
    "register_weights": "integration.weights",
    "spans_of_roles": "integration.roles",
    "verify": "recipes.verify",
    "weights_digest": "integration.weights",
}
__all__ = ["__version__", *_MODULES]

if TYPE_CHECKING:
    from .library import *  # noqa: F403
else:  # with `__getattr__`, a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Load a name when it is first asked for (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_module(".cache", __name__)
        value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
