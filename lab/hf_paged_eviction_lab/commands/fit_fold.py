"""`paged-eviction fit-fold`."""

from __future__ import annotations

from typing import ClassVar, Literal

from hf_paged_eviction_eval.options.base import Numbers, Options, option
from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions


class KernelOptions(Options):
    """How kernels are fitted."""

    title: ClassVar[str] = "kernels"

    policy: str = option("paged_eviction", "Whose losers are folded: the file serves this policy only.", metavar="NAME")
    profile: str | None = option(
        None,
        "File of paged-eviction prepare, for a policy that reads one. Default: that of the weights.",
        metavar="FILE",
    )
    budgets: Numbers = option("64,128", "Tokens that the cache holds; the windows take turns.", metavar="N,...")
    block_size: int = option(16, "Tokens per block.", at_least=1)
    heads: Literal["shared", "separate"] = option(
        "shared", "One decision for all KV heads of a layer, or one for each."
    )
    rank: int = option(8, "Features of a key: the state of a KV head weighs as much as so many tokens.", at_least=1)
    middle: int = option(64, "Width of the maps: the file grows with it.", at_least=1)
    epochs: int = option(20, "How often the windows are gone through for each layer.", at_least=1)


class FoldOptions(FitOptions, KernelOptions, ModelOptions):
    """What was typed."""


def fit_fold(options: FoldOptions) -> None:
    """Fit the kernels of --disposal fold to a model: a small state that stands for the tokens a policy lets go.

    The model reads the text with its full cache. What the policy would have let go of it is played on keys, values and
    queries, and for each layer two small maps learn to make of a constant state of those tokens what attention to them
    would have said. The model itself is not changed. A file serves one model and one policy, and any budget.

    Examples:
      paged-eviction fit-fold --model Qwen/Qwen3-8B --policy keydiff --budgets 512,1024 --window 4096 \\
        --text book.txt articles.jsonl --output qwen-fold.safetensors
      paged-eviction eval --model Qwen/Qwen3-8B --policies keydiff --budgets 1024 \\
        --disposal "fold(file='qwen-fold.safetensors')"
    """
    from hf_paged_eviction import make_policy
    from hf_paged_eviction_eval.errors import UserError

    from ..fold import save_kernels
    from ..fold.fit import Plan, fit_kernels
    from .fitting import run_fit

    try:
        policy = make_policy(options.policy).label
    except ValueError as error:
        raise UserError(f"--policy {options.policy!r}: {error}") from error
    try:
        budgets = tuple(int(part) for part in str(options.budgets).split(","))
    except ValueError as error:
        raise UserError(
            f"--budgets {options.budgets!r}: write numbers of tokens, such as 512,1024: kernels are fitted to windows "
            "of a fixed length"
        ) from error
    sizes = options.block_size, options.rank, options.middle, options.epochs
    plan = Plan(policy, budgets, options.heads, *sizes, profile=options.profile)
    run_fit(
        options,
        "kernels",
        lambda model, _, windows, progress: fit_kernels(model, windows, plan, progress),
        save_kernels,
        f"--policies {policy} --disposal \"fold(file='{options.output}')\"",
    )
