"""`paged-eviction fit-basis`."""

from __future__ import annotations

from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions


class FitBasisOptions(FitOptions, ModelOptions):
    """What was typed."""


def fit_basis(options: FitBasisOptions) -> None:
    """Fit a basis of keys and values to a model, for caches of low rank.

    Examples:
      paged-eviction fit-basis --model Qwen/Qwen3-8B --text book.txt articles.jsonl --output qwen-basis.safetensors
    """
    from ..low_rank.basis import save_basis
    from ..low_rank.fit import fit_basis
    from .fitting import run_fit

    run_fit(
        options,
        "a basis",
        lambda model, _, windows, progress: fit_basis(model, windows, progress),
        save_basis,
        f"bits=LowRank('{options.output}', rank=R)",
    )
