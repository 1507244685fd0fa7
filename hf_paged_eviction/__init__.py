"""Long contexts in a fixed amount of KV memory, for Hugging Face transformers.

>>> cache = PagedEvictionCache(model.config, budget=1024)  # doctest: +SKIP
>>> model.generate(**inputs, cache=cache)  # doctest: +SKIP

The first access to a name of the package loads torch and transformers, and registers the attention implementation
"paged_eviction" with transformers. `import hf_paged_eviction` alone does neither. `library.py` lists the names.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .library import *  # noqa: F403 - its __all__ is the list
else:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        """Load the library when the first of its names is asked for (PEP 562)."""
        if name == "__all__" or not name.startswith("_"):
            library = import_module(".library", __name__)
            globals().update({exported: getattr(library, exported) for exported in library.__all__})
            globals()["__all__"] = ["__version__", *library.__all__]
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
