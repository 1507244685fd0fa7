"""Options of all commands that fit something to a model."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hf_paged_eviction_eval.options.base import File, Options, option


class FitOptions(Options):
    """Texts to read, and the file to write; with `ModelOptions`."""

    first: ClassVar[tuple[str, ...]] = ("model", "text", "output", "tokens", "window")
    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    output: Path = option(..., "The file to write.", metavar="FILE.safetensors")
    text: list[File] | None = option(
        None,
        "Texts that the model reads: plain text, or JSON lines with a field context or text. Best like those that it "
        "will read later, including questions and answers.",
        shown="the documentation of Python",
    )
    tokens: int = option(65536, "Tokens to read in total.", at_least=1)
    window: int = option(1024, "Tokens per window; use the length of your texts.", at_least=1)
