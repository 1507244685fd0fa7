"""`paged-eviction fit-gate`."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..options.base import Options, option
from ..options.fit import FitOptions
from ..options.model import ModelOptions

EPILOG = """[bold]Examples[/]

  paged-eviction fit-gate --model Qwen/Qwen3-8B --text book.txt dialogues.jsonl --output qwen-gates.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies calibrated:qwen.safetensors,gate:qwen-gates.safetensors

[bold]What happens[/]

  The model reads the text once, window by window; hidden states and what later tokens did with each token go to
  OUTPUT.samples (tokens x hidden size x layers numbers in the model's type). Then each layer's gate is trained by
  itself. A command that was cut off goes on where it was; the folder is removed at the end.

  In Python: install_gates(model, "qwen-gates.safetensors"), then policy="gate:qwen-gates.safetensors". Commands
  install what their policies name.
"""


class GateOptions(Options):
    """How gates are trained."""

    panel: ClassVar[str] = "The gates"

    target: Literal["attention", "output"] = option(
        "attention",
        "What is foretold: the largest attention that a token gets from afar, or its largest part in an attention "
        "output (KVzip+).",
    )
    units: int = option(
        64,
        "Of the layer between hidden state and score; 0 = none, a line in closed form.",
        at_least=0,
    )
    epochs: int = option(6, "How often each token is looked at.", at_least=1)
    seed: int = option(0, "Of the first weights and of the order.")


class FitGateOptions(FitOptions, GateOptions, ModelOptions):
    """What was typed."""

    tokens: int = option(131072, "To read, in all; a quarter is kept for checking.", at_least=1)


def fit_gate(options: FitGateOptions) -> None:
    """Train the policy gate:FILE for a model: which tokens will be needed, told from hidden states."""
    from ..calibrate import text_settings
    from ..fit_gate import run_fit_gate

    settings = text_settings(options.read, options.window, options)
    run_fit_gate(settings, options.output, options.tokens, options.target, options.units, options.epochs, options.seed)
