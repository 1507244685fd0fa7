"""What caches are told. A new option of `PagedEvictionCache` is one field here."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from .base import Options, option


class CacheOptions(Options):
    """Options that every cache of a run gets as they are; each is an argument of `PagedEvictionCache` by its name."""

    panel: ClassVar[str] = "Cache"

    block_size: int = option(16, "Tokens per block.", at_least=1)
    heads: Literal["shared", "separate"] = option(
        "shared", "One decision for all KV heads of a layer, or one for each."
    )
    sink_tokens: int | None = option(None, "First tokens that are never evicted.", at_least=0, shown="one block")
    protected_prefix: int = option(
        0, "The same for a prefix that you know, such as a system prompt; the larger of the two counts.", at_least=0
    )
    recent_tokens: int | None = option(None, "Newest tokens that are never evicted.", at_least=0, shown="one block")
    positions: Literal["text", "cache"] = option(
        "text", "Where held tokens stand: at their place in the text, or one after the other."
    )
    disposal: str = option("drop", "What becomes of evicted tokens, with parameters.", metavar="NAME")

    @property
    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of `PagedEvictionCache`."""
        return {name: getattr(self, name) for name in CacheOptions.model_fields}


class OneCacheOptions(CacheOptions):
    """The same for commands that make one kind of cache."""

    panel: ClassVar[str] = "Cache"

    budget: int | None = option(None, "Tokens held per layer, a multiple of the block size.", at_least=1)
    policy: str = option(
        "paged_eviction",
        "One of `paged-eviction policies`, with parameters, modifiers and an allocator: snapkv(window=16), caote(h2o), "
        "h2o@pyramid.",
        metavar="NAME",
    )
