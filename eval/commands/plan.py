"""`paged-eviction plan`."""

from __future__ import annotations

from typing import ClassVar

from ..options.base import option
from ..options.model import EMBEDDED, Loading

EPILOG = """[bold]What the table says[/]

One line for each precision of keys and values: the largest budget that fits into the memory beside weights and \
temporary tensors, and what share of the keys and values of the whole context that is, in 16 bits.

loss: what prepare measured on these weights at this share, in nats per token. ~ is between two shares that were \
measured; ? is the number of the nearest one. The profile is found by the weights, if they are on this machine. They \
are not loaded: their digest reads a sample from the files. Without a profile the column is empty, and a line says why.

[bold]Examples[/]

How much of 128k tokens does a GPU of 24 GiB hold?

  paged-eviction plan --model Qwen/Qwen3-8B --context 128k --memory 24GiB

Eight requests at a time, in two precisions

  paged-eviction plan --model ./my-model --context 32k --memory 80GB --rows 8

With the losses of a profile of weights that are not here

  paged-eviction plan --model Qwen/Qwen3-8B --context 8k --memory 20GiB --profile my-model.safetensors

[bold]Afterwards, in a program[/]

  PagedEvictionCache(model.config, budget=TOKENS, bits=BITS)  # or the bytes of keys and values as budget
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder or a name on the Hub; the weights are not loaded",
    "context": "tokens of the longest text, such as 8192 or 128k",
    "memory": "memory for everything, such as 8GiB; without it the whole context is planned",
    "rows": "texts at a time (1)",
    "profile": "a file that prepare wrote: adds what was lost in its measurements",
    "dtype": "auto, float32, bfloat16 or float16",
}


class PlanOptions(Loading):
    """What was typed."""

    left_out: ClassVar[frozenset[str]] = frozenset({"device", "allow_pickle"})

    model: str = option(
        EMBEDDED,
        "A folder or a name on the Hugging Face Hub; embedded is the small model of this package. The "
        "configuration is read, and of weights that are here a sample.",
    )
    context: str = option("8k", "Tokens of the longest text; k = 1,024.", metavar="N")
    memory: str | None = option(
        None, "Memory for weights, keys and values and temporary tensors, such as 8GiB.", metavar="SIZE"
    )
    rows: int = option(1, "Texts at a time.", at_least=1)
    chunk: int = option(256, "Tokens that are read at once.", at_least=1)
    profile: str | None = option(
        None,
        "A profile of the model, for the column loss. Default: that of the weights, if they are here.",
        metavar="FILE",
    )


def plan(options: PlanOptions) -> None:
    """Work out which budgets and bits fit into how much memory, before a model is loaded.

    Takes a second: the model is built without weights.
    """
    from ..models.planning import run_plan

    run_plan(options)
