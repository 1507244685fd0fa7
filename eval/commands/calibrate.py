"""`paged-eviction calibrate`."""

from __future__ import annotations

from ..options.fit import FitOptions
from ..options.model import ModelOptions

EPILOG = """[bold]Examples[/]

  paged-eviction calibrate --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies paged_eviction,calibrated:qwen.safetensors --budgets 1024
"""


class CalibrateOptions(FitOptions, ModelOptions):
    """What was typed."""


def calibrate(options: CalibrateOptions) -> None:
    """Fit the policy calibrated:FILE to a model: what later tokens attend to, told from keys and values alone."""
    from ..calibrate import run_calibrate, text_settings

    settings = text_settings(options.read, options.window, options)
    run_calibrate(settings, options.output, options.tokens)
