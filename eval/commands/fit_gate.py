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

    target: Literal["attention", "kvzip"] = option(
        "attention",
        "What is foretold: the largest attention that a token gets from afar, or the largest that it gets while the "
        "model repeats the text (KVzip's score, as KVzap learns it), which takes a second reading.",
    )
    units: int = option(
        64,
        "Of the layer between hidden state and score; 0 = none, a line, found in closed form.",
        at_least=0,
    )
    epochs: int = option(6, "How often each token is looked at.", at_least=1)
    seed: int = option(0, "Of the first weights and of the order.")


class FitGateOptions(FitOptions, GateOptions, ModelOptions):
    """What was typed."""

    tokens: int = option(131072, "To read, in all; a quarter is kept for checking.", at_least=1)


def fit_gate(options: FitGateOptions) -> None:
    """Train the policy gate:FILE for a model: which tokens will be needed, told from hidden states.

    Without --text the model reads the documentation of Python.
    """
    from hf_paged_eviction.recipes.fit.gates import Training

    from ..caches.fitting.gates import run_fit_gate
    from ..caches.fitting.reading import text_settings

    training = Training(**{name: getattr(options, name) for name in GateOptions.model_fields})
    settings = text_settings(options.read, options.window, options, needed=False)
    run_fit_gate(settings, options.output, options.tokens, training)
