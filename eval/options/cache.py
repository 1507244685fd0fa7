"""What caches are told. A new option of `PagedEvictionCache` is one field here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from .base import Numbers, Options, option, readable


def precision(text: str | int | Sequence[int | None] | None) -> int | tuple[int | None, int | None] | None:
    """What `bits=` of a cache is given for "4" or 4, or for "8,none" or [8, None]: keys and values apart.

    Raises:
        ValueError: the text is neither.
    """
    if text is None:
        return None
    from hf_paged_eviction.precision.codec import check_bits  # asked for rarely, and brings torch

    typed = text if isinstance(text, str) else ",".join(map(str, [text] if isinstance(text, int) else text))
    try:
        counts = _counts(typed)
        pair = check_bits(counts[0] if len(counts) == 1 else counts)
    except ValueError:
        raise ValueError("write 8, 4, 3 or 2, or two of these or none for keys and values, such as 8,4") from None
    return pair[0] if len(counts) == 1 else pair


def ranks(text: str | None) -> int | tuple[int | None, int | None] | None:
    """What `rank=` of a cache is given for "16", or for "16,none": keys and values apart.

    Raises:
        ValueError: the text is neither.
    """
    if text is None:
        return None
    try:
        counts = _counts(text)
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or any(count is not None and count < 1 for count in counts):
        raise ValueError("write a number from 1 up, or two of these or none for keys and values, such as 16,24")
    return counts[0] if len(counts) == 1 else (counts[0], counts[1])


def _counts(text: str) -> list[int | None]:
    return [None if word.strip().lower() == "none" else int(word) for word in text.split(",")]


#: As `precision` reads it.
Bits = Annotated[Numbers, readable(precision)]
#: As `ranks` reads it.
Ranks = Annotated[Numbers, readable(ranks)]


class CacheOptions(Options):
    """Options that every cache of a run gets as they are; each is an argument of `PagedEvictionCache` by its name."""

    panel: ClassVar[str] = "Cache"

    block_size: int = option(16, "Tokens per block.", at_least=1)
    heads: Literal["shared", "separate"] | None = option(
        None, "One decision for all KV heads of a layer, or one for each.", shown="the policy's"
    )
    sink_tokens: int | None = option(None, "First tokens that are never evicted.", at_least=0, shown="the policy's")
    protected_prefix: int = option(
        0, "The same for a prefix that you know, such as a system prompt; the larger of the two counts.", at_least=0
    )
    recent_tokens: int | None = option(None, "Newest tokens that are never evicted.", at_least=0, shown="one block")
    bits: Bits | None = option(
        None,
        "Bits of a number that is kept, 8, 4, 3 or 2; two numbers for keys and values, such as 8,4.",
        metavar="N",
        shown="the model's",
    )
    rank: Ranks | None = option(
        None,
        "Directions of --basis whose coefficients are kept; two numbers for keys and values, such as 16,24.",
        metavar="N",
        shown="all channels",
    )
    basis: str | None = option(
        None, "What `paged-eviction fit-basis` wrote for this model; for --rank.", metavar="FILE"
    )
    positions: Literal["text", "cache"] = option(
        "text", "Where held tokens stand: at their place in the text, or one after the other."
    )
    disposal: str = option("drop", "What becomes of evicted tokens, with parameters.", metavar="NAME")

    @property
    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of `PagedEvictionCache`."""
        given = {name: getattr(self, name) for name in CacheOptions.model_fields}
        return {**given, "bits": precision(self.bits), "rank": ranks(self.rank)}


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
