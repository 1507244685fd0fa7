"""`paged-eviction compress`."""

from __future__ import annotations

from ..options.base import File, option
from ..options.cache import OneCacheOptions
from ..options.model import ModelOptions

EPILOG = """[bold]Examples[/]

  paged-eviction compress --text book.txt --budget 256 --policy keydiff --output book.safetensors

  paged-eviction compress --model Qwen/Qwen3-8B --text book.txt --budget 512MiB --output book.safetensors

Then answer questions about it in Python, as often as you like

  cache = PagedEvictionCache.load("book.safetensors", model, device=model.device)

  model.generate(**cache.follow_up(question_ids), cache=cache)
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder or a name on the Hub; without it the small model of this package",
    "text": "plain text to read",
    "output": "the file to write",
    "budget": "tokens per layer, 25% (of the text), '25% of memory', or bytes such as 512MiB",
    "policy": "one of `paged-eviction policies` (auto)",
    "prefill_chunk_size": "most tokens per forward: bounds memory (512)",
    "bits": "bits per stored number: 8, 4, 3 or 2",
    "device": "cpu, cuda, cuda:1, ...",
}


class CompressOptions(ModelOptions, OneCacheOptions):
    """What was typed."""

    text: File = option(..., "Plain text that the model reads.", metavar="FILE")
    output: File = option(..., "The file to write.", metavar="FILE.safetensors")
    prefill_chunk_size: int = option(
        512, "Most tokens per forward while the text is read: bounds the memory.", at_least=1
    )


def compress(options: CompressOptions) -> None:
    """Read a text once, compress it, and save the cache, to answer questions about it later.

    Choose a policy that does not depend on the end of the text, such as keydiff, because any question may follow.
    """
    from ..caches.contexts import run_compress

    run_compress(options)
