"""The largest batch that fits, by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...running.memory import free_memory, is_out_of_memory
from ..settings import BenchSettings
from ..variants import make_cache
from .decoder import Decoder
from .filling import LayerShape, fill

#: Enough for a growing cache to have been copied once.
_STEPS = 2
#: No batch above this one is tried.
_MOST = 2**16


def largest(fits: Callable[[int], bool], most: int = _MOST) -> int:
    """The largest number up to `most` for which `fits` holds, 0 if none: doubled until it does not, then bisected."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    if low == most:
        return low
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fits(
    model: Any, shapes: dict[int, LayerShape], settings: BenchSettings, name: str, budget: int, context: int | None
) -> Callable[[int], bool]:
    """Whether a batch of that many rows holds its context and decodes; not compiled, whatever the variant."""

    def try_batch(rows: int) -> bool:
        try:
            held = make_cache(name, model, settings.but(steps=_STEPS), budget, rows, context)
            fill(held.cache, shapes, rows, held.filled, model)
            Decoder(model, model.forward, held, rows).run(_STEPS)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def try_and_clean(rows: int) -> bool:
        fine = try_batch(rows)
        free_memory()  # what failed is still referred to by the error until here
        return fine

    return try_and_clean
