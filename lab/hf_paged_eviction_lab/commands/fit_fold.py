"""`paged-eviction fit-fold`."""

from __future__ import annotations

from .fold_options import FoldOptions

EPILOG = """[bold]What it does[/]

The model reads the text with its full cache. What the policy would have let go of it is played on keys, values and
queries, and for each layer two small maps learn to make of a constant state of those tokens what attention to them
would have said. The model itself is not changed.

A file serves one model and one policy, and any budget.

[bold]Examples[/]

  paged-eviction fit-fold --model Qwen/Qwen3-8B --policy keydiff --budgets 512,1024 --window 4096 --text book.txt
  articles.jsonl --output qwen-fold.safetensors

  paged-eviction eval --model Qwen/Qwen3-8B --policies keydiff --budgets 1024 --disposal fold:qwen-fold.safetensors
"""


def fit_fold(options: FoldOptions) -> None:
    """Fit the kernels of --disposal fold:FILE to a model: a small state that stands for the tokens a policy lets go."""
    from .fold import make_plan, run_fit_fold
    from .reading import text_settings

    settings = text_settings(options.read, options.window, options)
    run_fit_fold(settings, options.output, options.tokens, make_plan(options))
