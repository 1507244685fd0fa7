"""`paged-eviction fit-gate`."""

from __future__ import annotations

from hf_paged_eviction_eval.options.base import option
from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions


class FitGateOptions(FitOptions, ModelOptions):
    """What was typed."""

    units: int = option(64, "Width of the layer between hidden state and score.", at_least=1)
    epochs: int = option(6, "How often each token is used.", at_least=1)


def fit_gate(options: FitGateOptions) -> None:
    """Train gates for a model: they read hidden states and predict which tokens will be needed.

    The model reads the text once; hidden states stay in memory (tokens x hidden size x layers numbers), with the
    largest attention that each token gets from afar. Then the gate of each layer is trained alone, in minutes.

    Examples:
      paged-eviction fit-gate --model Qwen/Qwen3-8B --text book.txt dialogues.jsonl --output qwen-gates.safetensors
    """
    from ..gate import save_gates
    from ..gate.fit import Training, fit_gates
    from .fitting import run_fit

    training = Training(options.units, options.epochs)
    run_fit(
        options,
        "gates",
        lambda model, _, windows, progress: fit_gates(model, windows, training, progress),
        save_gates,
        f"install_gates(model, '{options.output}'), then policy=Gate('{options.output}')",
    )
