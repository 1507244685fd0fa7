"""`paged-eviction prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ..options.base import File, option
from ..options.model import ModelOptions

EPILOG = """[bold]What happens[/]

The model reads some text. A score of tokens and the share of each KV head are fitted to its own attention; then the \
caches that matter are compared with the full one, in text that goes on and for made-up facts that are asked for, and \
what was found is kept where caches find it by the digest of the weights. A model that was prepared before is done at \
once.

[bold]Examples[/]

  paged-eviction prepare --model HuggingFaceTB/SmolLM2-135M-Instruct

  paged-eviction prepare --model Qwen/Qwen3-8B --text reports/*.txt --use questions

  paged-eviction prepare --model Qwen/Qwen3-8B --output qwen.safetensors

[bold]Afterwards[/]

  prepare(model, tokenizer)  # in a program, once: finds the profile

  cache = PagedEvictionCache(model.config, budget=1024)
"""


class PrepareOptions(ModelOptions):
    """What was typed."""

    panel: ClassVar[str] = "What is measured"
    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    text: list[File] | None = option(
        None,
        "What the model reads: plain texts, or JSON lines with a field context or text; some ten thousand words like "
        "those that it will read later.",
        metavar="FILE...",
        shown="the documentation of Python",
    )
    files: list[File] | None = option(None, "More of them.", metavar="[FILE...]", argument=True)
    use: Literal["text", "questions", "both"] = option(
        "both", "What the cache is for: text that goes on, questions about what was read, or both.", metavar="USE"
    )
    output: Path | None = option(None, "Also write the profile to this file.", metavar="FILE.safetensors")


def prepare(options: PrepareOptions) -> None:
    """Measure once, for a model, what its cache should keep: from then on caches are as good as they can be.

    Takes some minutes on a CPU and seconds on a GPU.
    """
    from ..models.preparing import run_prepare

    run_prepare(options)
