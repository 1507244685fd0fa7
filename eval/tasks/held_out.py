"""Text the embedded model has never seen, for perplexity."""

from __future__ import annotations

from . import library


def held_out_texts() -> dict[str, str]:
    """Source of the held-out standard library modules by name (it differs a little between Python versions)."""
    return {module: library.source(module) for module in library.HELD_OUT}
