"""`paged-eviction plan`."""

from __future__ import annotations

from typing import ClassVar

from ..options.base import option
from ..options.model import Loading


class PlanOptions(Loading):
    """What was typed."""

    left_out: ClassVar[frozenset[str]] = frozenset({"device", "allow_pickle"})

    context: str = option("8k", "Tokens of the longest text; k = 1,024.", metavar="N")
    memory: str | None = option(
        None, "Memory for weights, keys and values and temporary tensors, such as 8GiB.", metavar="SIZE"
    )
    rows: int = option(1, "Texts at a time.", at_least=1)
    chunk: int = option(256, "Tokens that are read at once.", at_least=1)
    profile: str | None = option(
        None, "A profile of the model, for the column loss.", metavar="FILE", shown="that of the weights"
    )


def plan(options: PlanOptions) -> None:
    """Work out which budgets and bits fit into how much memory, before a model is loaded.

    Takes a second: the model is built without weights. Each line of the table has a precision of keys and values, the
    largest budget that fits, and its share of the keys and values of the whole context in 16 bits. The loss is what
    prepare measured on these weights at this share, in nats per token: ~ is between two measured shares, ? is the
    number of the nearest one. The profile is found by a sample of the weights' files, if they are on this machine.

    Examples:
      # How much of 128k tokens does a GPU of 24 GiB hold?
      paged-eviction plan --model Qwen/Qwen3-8B --context 128k --memory 24GiB

      # Eight requests at a time; losses of a profile from elsewhere
      paged-eviction plan --model ./my-model --context 32k --memory 80GB --rows 8 --profile my-model.safetensors

    Then, in a program, with the tokens or the bytes of a line as budget:
      PagedEvictionCache(model.config, budget=TOKENS, bits=BITS)
    """
    from ..models.planning import run_plan

    run_plan(options)
