"""`paged-eviction fit-gate`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.base import Options, option
from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions

EPILOG = """[bold]Examples[/]

  paged-eviction fit-gate --model Qwen/Qwen3-8B --text book.txt dialogues.jsonl --output qwen-gates.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies calibrated:qwen.safetensors,gate:qwen-gates.safetensors

[bold]What happens[/]

  The model reads the text once, window by window; hidden states and what later tokens did with each token go to
  a folder beside OUTPUT (tokens x hidden size x layers numbers in the model's type), which is removed at the end. Then
  each layer's gate is trained by itself.

  With --loss straight_through the model computes each window forwards and backwards, and stays as it is.

  In Python: install_gates(model, "qwen-gates.safetensors"), then policy="gate:qwen-gates.safetensors". Commands
  install what their policies name.
"""


class GateOptions(Options):
    """How gates are trained."""

    panel: ClassVar[str] = "The gates"

    loss: Literal["regression", "straight_through"] = option(
        "regression",
        "What is learned from: regression foretells what later tokens do with each token, by forward passes only. "
        "straight_through is Attention-Gate's own: gates shut out tokens in the model's attention and learn from the "
        "loss of the language model. It needs gradients through the model, so memory for the activations of a window, "
        "and many times as long.",
    )
    target: Literal["attention", "kvzip"] = option(
        "attention",
        "What a regression foretells: the largest attention that a token gets from afar, or the largest that it gets "
        "while the model repeats the text (KVzip's score, as KVzap learns it), which takes a second reading.",
    )
    keep: float | None = option(
        None,
        "Of straight_through: the share of the tokens that gates are to let through (default: 0.0625).",
    )
    units: int = option(
        64,
        "Of the layer between hidden state and score; 0 = none, a line (a regression has it in closed form).",
        at_least=0,
    )
    epochs: int | None = option(
        None,
        "How often each token is looked at (default: 6; of straight_through 2).",
        at_least=1,
    )
    seed: int = option(0, "Of the first weights and of the order.")


class FitGateOptions(FitOptions, GateOptions, ModelOptions):
    """What was typed."""

    tokens: int = option(131072, "To read, in all; a quarter is kept for checking.", at_least=1)


def fit_gate(options: FitGateOptions) -> None:
    """Train the policy gate:FILE for a model: which tokens will be needed, told from hidden states.

    Without --text the model reads the documentation of Python.
    """
    from ..gates.fit import Training
    from ..gates.straight_through import StraightThrough
    from .gates import Ways, run_fit_gate
    from .reading import text_settings

    own = {"regression": "target", "straight_through": "keep"}
    for loss, name in own.items():
        if loss != options.loss and name in options.model_fields_set:
            raise UserError(f"--{name} is of no meaning with --loss {options.loss}")
    overrides = {name: getattr(options, name) for name in ("units", "epochs", "seed", own[options.loss])}
    chosen: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    try:
        training: Ways = Training(**chosen) if options.loss == "regression" else StraightThrough(**chosen)
    except ValueError as error:
        raise UserError(f"cannot train gates: {error}") from error
    settings = text_settings(options.read, options.window, options, needed=False)
    run_fit_gate(settings, options.output, options.tokens, training)
