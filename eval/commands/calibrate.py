"""`paged-eviction calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ..options.base import File, option
from ..options.model import ModelOptions

EPILOG = """[bold]Examples[/]

  paged-eviction calibrate --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies paged_eviction,calibrated:qwen.safetensors --budgets 1024
"""


class CalibrateOptions(ModelOptions):
    """What was typed."""

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


def calibrate(options: CalibrateOptions) -> None:
    """Fit the policy calibrated:FILE to a model: what later tokens attend to, told from keys and values alone."""
    from ..calibrate import run_calibrate, text_settings

    settings = text_settings([*(options.text or ()), *(options.files or ())], options.window, options)
    run_calibrate(settings, options.output, options.tokens)
