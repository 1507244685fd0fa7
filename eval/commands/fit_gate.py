"""`paged-eviction fit-gate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import typer

from ..errors import UserError
from ..options.base import File, option
from ..options.model import ModelOptions
from .command import add_command

EPILOG = """[bold]Examples[/]

  paged-eviction fit-gate --model Qwen/Qwen3-8B --text book.txt dialogues.jsonl --output qwen-gates.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies calibrated:qwen.safetensors,gate:qwen-gates.safetensors

[bold]What happens[/]

  The model reads the text once, window by window; hidden states and what later tokens did with each token go to
  OUTPUT.samples (tokens x hidden size x layers numbers in the model's type). Then each layer's gate is trained by
  itself. A command that was cut off goes on where it was; the folder is removed at the end.

  With --loss straight_through the model computes each window forwards and backwards, and stays as it is.

  In Python: install_gates(model, "qwen-gates.safetensors"), then policy="gate:qwen-gates.safetensors". Commands
  install what their policies name.
"""


class FitGateOptions(ModelOptions):
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
    tokens: int = option(131072, "To read, in all; a quarter is kept for checking.", at_least=1)
    window: int = option(1024, "Tokens per window: as long as the texts that matter.", at_least=1)
    loss: Literal["regression", "straight_through"] = option(
        "regression",
        "What is learned from: regression foretells what later tokens do with each token, by forward passes only. "
        "straight_through is Attention-Gate's own: gates shut out tokens in the model's attention and learn from the "
        "loss of the language model. It needs gradients through the model, so memory for the activations of a window, "
        "and many times as long.",
        panel="The gates",
    )
    target: Literal["attention", "output"] = option(
        "attention",
        "What a regression foretells: the largest attention that a token gets from afar, or its largest part in an "
        "attention output (KVzip+).",
        panel="The gates",
    )
    keep: float | None = option(
        None,
        "Of straight_through: the share of the tokens that gates are to let through (default: 0.0625).",
        panel="The gates",
    )
    units: int = option(
        64,
        "Of the layer between hidden state and score; 0 = none, a line (a regression has it in closed form).",
        at_least=0,
        panel="The gates",
    )
    epochs: int | None = option(
        None,
        "How often each token is looked at (default: 6; of straight_through 2).",
        at_least=1,
        panel="The gates",
    )
    seed: int = option(0, "Of the first weights and of the order.", panel="The gates")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "fit-gate", FitGateOptions, fit_gate, EPILOG)


def fit_gate(options: FitGateOptions) -> None:
    """Train the policy gate:FILE for a model: which tokens will be needed, told from hidden states."""
    from hf_paged_eviction.recipes.fit_gates import Training
    from hf_paged_eviction.recipes.straight_through import StraightThrough

    from ..calibrate import text_settings
    from ..fit_gate import Ways, run_fit_gate

    own = {"regression": "target", "straight_through": "keep"}
    for loss, name in own.items():
        if loss != options.loss and name in options.model_fields_set:
            raise UserError(f"--{name} is of no meaning with --loss {options.loss}")
    given = {name: getattr(options, name) for name in ("units", "epochs", "seed", own[options.loss])}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        training: Ways = Training(**chosen) if options.loss == "regression" else StraightThrough(**chosen)
    except ValueError as error:
        raise UserError(f"cannot train gates: {error}") from error
    settings = text_settings([*(options.text or ()), *(options.files or ())], options.window, options)
    run_fit_gate(settings, options.output, options.tokens, training)
