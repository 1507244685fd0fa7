"""`paged-eviction fit-basis`."""

from __future__ import annotations

from hf_paged_eviction_eval.options.base import File, option
from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions

EPILOG = """[bold]Examples[/]

  paged-eviction fit-basis --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen-basis.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --bits "low_rank:qwen-basis.safetensors(rank=64)" --budgets 1024
"""


class FitBasisOptions(FitOptions, ModelOptions):
    """What was typed."""

    text: list[File] | None = option(
        None,
        "What the model reads: plain texts, or JSON lines with a field context or text. Best like that which it will "
        "read later.",
        metavar="FILE...",
    )
    tokens: int = option(65536, "To read, in all.", at_least=1)


def fit_basis(options: FitBasisOptions) -> None:
    """Fit a basis of keys and values to a model, for caches of low rank. Broken off, the same command continues."""
    from .basis import run_fit_basis
    from .reading import text_settings

    settings = text_settings(options.read, options.window, options)
    run_fit_basis(settings, options.output, options.tokens)
