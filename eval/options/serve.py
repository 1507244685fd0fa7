"""The options of `paged-eviction serve`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from .base import option
from .cache import OneCacheOptions


class ServeOptions(OneCacheOptions):
    """What was typed; what transformers serve takes besides goes there as it is."""

    panel: ClassVar[str] = "The server"
    #: Pages of continuous batching hold tokens as they came, and one decision for all KV heads.
    left_out: ClassVar[frozenset[str]] = frozenset({"heads", "bits", "disposal"})

    model: str = option(
        ..., "A folder or a name on the Hugging Face Hub; embedded is the small one of the package.", metavar="NAME"
    )
    budget: int = option(..., "Tokens held per request and layer, a multiple of the block size.", at_least=1)
    policy: str = option(
        "paged_eviction", "What evicts: keys, values and positions may decide, queries may not.", metavar="NAME"
    )
    positions: Literal["text", "cache"] = option(
        "text", "Where held tokens stand; text only, cache is refused with the reason."
    )
    prefill_chunk_size: int = option(
        512, "Prompts are read in pieces of so many tokens.", at_least=1, panel=OneCacheOptions.panel
    )
    max_new_tokens: int = option(4096, "Most that a request may ask for.", at_least=1)

    @property
    def batching_arguments(self) -> dict[str, Any]:
        """Arguments of `paged_batching`."""
        return {name: getattr(self, name) for name in self.offered() if name not in ("model", "max_new_tokens")}
