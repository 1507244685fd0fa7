"""What commands that fit something to a model are told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from .base import File, Options, option


class FitOptions(Options):
    """Texts to read, and the file to write; with `ModelOptions`."""

    panel: ClassVar[str] = "The text"
    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    output: Path = option(..., "The file to write.", metavar="FILE.safetensors")
    text: list[File] | None = option(
        None,
        "What the model reads: plain texts, or JSON lines with a field context or text. Best like that which it will "
        "read later, questions and answers included.",
        metavar="FILE...",
    )
    files: list[File] | None = option(None, "More of them.", metavar="[FILE...]", argument=True)
    tokens: int = option(65536, "To read, in all; a few thousand are enough.", at_least=1)
    window: int = option(1024, "Tokens per window: as long as the texts that matter.", at_least=1)

    @property
    def read(self) -> list[Path]:
        """All files."""
        return [*(self.text or ()), *(self.files or ())]
