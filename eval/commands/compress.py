"""`paged-eviction compress`."""

from __future__ import annotations

from typing import ClassVar

from ..options.base import File, option
from ..options.cache import OneCacheOptions
from ..options.model import ModelOptions


class CompressOptions(ModelOptions, OneCacheOptions):
    """What was typed."""

    first: ClassVar[tuple[str, ...]] = ("model", "text", "output", "budget", "policy", "bits", "prefill_chunk_size")

    text: File = option(..., "Plain text that the model reads.", metavar="FILE")
    output: File = option(..., "The file to write.", metavar="FILE.safetensors")
    prefill_chunk_size: int = option(512, "Most tokens per forward: bounds the memory of reading.", at_least=1)


def compress(options: CompressOptions) -> None:
    """Read a text once, compress it, and save the cache, to answer questions about it later.

    Choose a policy that does not depend on the end of the text, such as keydiff, because any question may follow.

    Examples:
      paged-eviction compress --text book.txt --budget 256 --policy keydiff --output book.safetensors
      paged-eviction compress --model Qwen/Qwen3-8B --text book.txt --budget 512MiB --output book.safetensors

    Then answer questions in a program, as often as you like:
      cache = PagedEvictionCache.load("book.safetensors", model, device=model.device)
      model.generate(**cache.follow_up(question_ids), cache=cache)
    """
    from ..caches.contexts import run_compress

    run_compress(options)
