"""`paged-eviction calibrate`."""

from __future__ import annotations

from pathlib import Path

from ..options.base import option
from ..options.fit import FitOptions
from ..options.model import ModelOptions

EPILOG = """[bold]Examples[/]

  paged-eviction calibrate --model HuggingFaceTB/SmolLM2-135M-Instruct

  paged-eviction calibrate --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies paged_eviction,calibrated:qwen.safetensors --budgets 1024
"""


class CalibrateOptions(FitOptions, ModelOptions):
    """What was typed."""

    output: Path | None = option(  # type: ignore[assignment]
        None, "The file to write.", metavar="FILE.safetensors", shown="where caches find it by the model's weights"
    )
    tokens: int = option(8192, "To read, in all; a few thousand are enough.", at_least=1)


def calibrate(options: CalibrateOptions) -> None:
    """Fit the policy calibrated:FILE to a model: what later tokens attend to, told from keys and values alone.

    Without --output the file is found by the digest of the model's weights from then on: caches to which no policy is
    named use it.
    Without --text the model reads the documentation of Python. A model of 135 million parameters takes about two
    minutes of processor time.
    """
    from ..caches.fitting.calibrate import run_calibrate
    from ..caches.fitting.reading import text_settings

    settings = text_settings(options.read, options.window, options, needed=False)
    run_calibrate(settings, options.output, options.tokens)
