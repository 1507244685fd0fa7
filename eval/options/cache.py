"""What caches are told. A new option of `PagedEvictionCache` is one field here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from .base import Numbers, Options, option


def precision(text: str | int | Sequence[int | None] | None) -> int | tuple[int | None, int | None] | None:
    """What `bits=` of a cache is given for "4" or 4, or for "8,none" or [8, None]: keys and values apart.

    Raises:
        ValueError: the text is neither.
    """
    if text is None:
        return None
    from hf_paged_eviction.store.codec import check_bits  # asked for rarely, and brings torch

    typed = text if isinstance(text, str) else ",".join(map(str, [text] if isinstance(text, int) else text))
    words = [word.strip().lower() for word in typed.split(",")]
    try:
        counts = [None if word == "none" else int(word) for word in words]
        pair = check_bits(counts[0] if len(counts) == 1 else counts)
    except ValueError:
        raise ValueError("write 8, 4 or 2, or two of these or none for keys and values, such as 8,4") from None
    return pair[0] if len(words) == 1 else pair


def _checked(text: str) -> str:
    precision(text)
    return text


#: As `precision` reads it.
Bits = Annotated[Numbers, AfterValidator(_checked)]


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
    bits: Bits | None = option(
        None,
        "Bits of a number that is kept, 8, 4 or 2; two numbers for keys and values, such as 8,4.",
        metavar="N",
        shown="the model's",
    )
    positions: Literal["text", "cache"] = option(
        "text", "Where held tokens stand: at their place in the text, or one after the other."
    )
    disposal: str = option("drop", "What becomes of evicted tokens, with parameters.", metavar="NAME")

    @property
    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of `PagedEvictionCache`."""
        given = {name: getattr(self, name) for name in CacheOptions.model_fields}
        return {**given, "bits": precision(self.bits)}


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
