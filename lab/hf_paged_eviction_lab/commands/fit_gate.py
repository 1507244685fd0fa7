"""`paged-eviction fit-gate`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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

  With --target straight_through the model computes each window forwards and backwards, and stays as it is.

  In Python: install_gates(model, "qwen-gates.safetensors"), then policy="gate:qwen-gates.safetensors". Commands
  install what their policies name.
"""


class GateOptions(Options):
    """How gates are trained."""

    panel: ClassVar[str] = "The gates"

    target: Literal["attention", "kvzip", "straight_through"] = option(
        "attention",
        "What is learned. attention: the largest attention that a token gets from afar. kvzip: the largest that it "
        "gets while the model repeats the text, which takes a second reading. Both by forward passes only. "
        "straight_through: gates shut out tokens in the model's attention and learn from the loss of the language "
        "model, as Attention-Gate's; it needs gradients through the model, so memory for the activations of a window, "
        "and many times as long.",
    )
    keep: float = option(
        0.0625, "Of straight_through: the share of the tokens that gates are to let through.", at_least=0, at_most=1
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


class FitGateOptions(FitOptions, GateOptions, ModelOptions):
    """What was typed."""

    tokens: int = option(131072, "Tokens to read in total; a quarter is kept for checking.", at_least=1)


def fit_gate(options: FitGateOptions) -> None:
    """Train the policy gate:FILE for a model: which tokens will be needed, told from hidden states."""
    from hf_paged_eviction.internals import REPEAT

    from ..gates import save_gates
    from ..gates.fit import fit_gates
    from ..gates.training import Training
    from .fitting import run_fit

    training = Training(options.target, options.units, options.epochs, options.keep)

    def fit(model: Any, tokenizer: Any, windows: Any, progress: Any) -> Any:
        probe = tokenizer.encode(REPEAT, add_special_tokens=False)
        folder = options.output.parent
        return fit_gates(model, windows, training, probe_ids=probe, folder=folder, progress=progress)

    run_fit(options, "gates", fit, save_gates, f"--policies gate:{options.output}")
