"""`paged-eviction compress`."""

from __future__ import annotations

from typing import ClassVar

import typer

from ..options.base import File, option
from ..options.cache import OneCacheOptions
from ..options.model import ModelOptions
from .command import add_command

EPILOG = """[bold]Examples[/]

  paged-eviction compress --text book.txt --budget 256 --policy keydiff --output book.safetensors

  paged-eviction compress --model Qwen/Qwen3-8B --text book.txt --memory 512MiB --output book.safetensors

Then, as often as you like

  paged-eviction chat --context book.safetensors

The same in Python

  cache = PagedEvictionCache.load("book.safetensors", model.config, device=model.device)
  model.generate(**cache.follow_up(question_ids), past_key_values=cache)
"""


class CompressOptions(ModelOptions, OneCacheOptions):
    """What was typed."""

    panel: ClassVar[str] = "The text"

    text: File = option(..., "What the model reads: a plain text.", metavar="FILE")
    output: File = option(..., "The file to write.", metavar="FILE.safetensors")
    memory: str | None = option(
        None,
        "Instead of --budget: bytes of keys and values in all paged layers, such as 512MiB or 2GB.",
        metavar="SIZE",
        panel="Cache",
    )
    prefill_chunk_size: int = option(
        512, "Most tokens per forward while the text is read: bounds the memory.", at_least=1, panel="Cache"
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "compress", CompressOptions, compress, EPILOG)


def compress(options: CompressOptions) -> None:
    """Read a text once, compress it, and save the cache: to answer from it many times, on any day and machine.

    A policy that needs no question, such as keydiff, keeps what any question may ask for.
    """
    from ..contexts import run_compress

    run_compress(options)
