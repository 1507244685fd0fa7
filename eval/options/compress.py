"""The options of `paged-eviction compress`."""

from __future__ import annotations

from typing import ClassVar

from .base import File, option
from .cache import OneCacheOptions
from .model import ModelOptions


class CompressOptions(ModelOptions, OneCacheOptions):
    """What was typed."""

    panel: ClassVar[str] = "The text"
    text: File = option(..., "Plain text that the model reads.", metavar="FILE")
    output: File = option(..., "The file to write.", metavar="FILE.safetensors")
    prefill_chunk_size: int = option(
        512, "Most tokens per forward while the text is read: bounds the memory.", at_least=1, panel="Cache"
    )
