"""`paged-eviction prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ..options.base import File, option
from ..options.model import ModelOptions


class PrepareOptions(ModelOptions):
    """What was typed."""

    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    text: list[File] | None = option(
        None,
        "Some ten thousand words like your prompts: plain text, or .jsonl with a field context or text.",
        shown="the documentation of Python",
    )
    use: Literal["text", "questions", "both"] = option("both", "What the cache is for: text to go on, or questions.")
    quick: bool = option(False, "Try fewer caches on less text.")
    output: Path | None = option(None, "Also write the profile to this file.", metavar="FILE.safetensors")


def prepare(options: PrepareOptions) -> None:
    """Measure once which tokens and heads matter for a model, so that its caches keep these.

    The model reads some text, for a few minutes on a CPU. Scores of tokens and a budget for each KV head are fitted to
    its attention. Then several kinds of caches are compared with the full cache, in running text and on questions
    about made-up facts. The result, the profile, is stored where caches find it by the digest of the weights. A run
    that was stopped goes on where it was.

    Examples:
      # Once for a model; a second run finds the profile and stops
      paged-eviction prepare --model HuggingFaceTB/SmolLM2-135M-Instruct

      # On your text, for questions about it; the file is for another machine
      paged-eviction prepare --model Qwen/Qwen3-8B --text reports/*.txt --use questions --output qwen.safetensors

    Then, in a program:
      prepare(model, tokenizer)  # finds the profile
      cache = PagedEvictionCache(model.config, budget=1024)
    """
    from ..models.preparing import run_prepare

    run_prepare(options)
