"""`paged-eviction prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ..options.base import File, option
from ..options.model import ModelOptions

EPILOG = """[bold]What happens[/]

The model reads some text. Scores of tokens and a budget for each KV head are fitted to its attention. Then several \
kinds of caches are compared with the full cache, in running text and on questions about made-up facts. The result, \
the profile, is stored where caches find it by the digest of the weights.

[bold]Examples[/]

Once for a model; a second run finds the profile and stops

  paged-eviction prepare --model HuggingFaceTB/SmolLM2-135M-Instruct

On your own text, for questions about it

  paged-eviction prepare --model Qwen/Qwen3-8B --text reports/*.txt --use questions

To take the profile to another machine

  paged-eviction prepare --model Qwen/Qwen3-8B --output qwen.safetensors

[bold]Afterwards, in a program[/]

  prepare(model, tokenizer)  # finds the profile

  cache = PagedEvictionCache(model.config, budget=1024)
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder or a name on the Hub; without it the small model of this package",
    "text": "texts to read: plain text or JSON lines (the documentation of Python)",
    "use": "what the cache is for: text, questions or both (both)",
    "quick": "try fewer caches on less text",
    "output": "also write the profile to this file",
    "device": "cpu, cuda, cuda:1, ...",
    "dtype": "auto, float32, bfloat16 or float16",
}


class PrepareOptions(ModelOptions):
    """What was typed."""

    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    text: list[File] | None = option(
        None,
        "Texts that the model reads: plain text, or JSON lines with a field context or text; some ten thousand words "
        "like those of your prompts.",
        metavar="FILE...",
        shown="the documentation of Python",
    )
    files: list[File] | None = option(None, "More files for --text.", metavar="FILE", argument=True)
    use: Literal["text", "questions", "both"] = option(
        "both", "What the cache is for: text that goes on, questions about what was read, or both.", metavar="USE"
    )
    quick: bool = option(False, "Try fewer caches on less text.")
    output: Path | None = option(None, "Also write the profile to this file.", metavar="FILE.safetensors")


def prepare(options: PrepareOptions) -> None:
    """Measure once which tokens and heads matter for a model, so that its caches keep these.

    Takes a few minutes on a CPU. A run that was stopped goes on where it was.
    """
    from ..models.preparing import run_prepare

    run_prepare(options)
