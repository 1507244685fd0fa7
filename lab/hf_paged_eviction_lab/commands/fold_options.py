"""What `fit-fold` is told."""

from __future__ import annotations

from typing import ClassVar, Literal

from hf_paged_eviction_eval.options.base import Numbers, Options, option
from hf_paged_eviction_eval.options.model import ModelOptions

from .fit_options import FitOptions


class KernelOptions(Options):
    """How kernels are fitted."""

    panel: ClassVar[str] = "What is folded"

    policy: str = option("paged_eviction", "Whose losers are folded: the file serves this policy only.", metavar="NAME")
    budgets: Numbers = option("64,128", "Tokens that the cache holds; the windows take turns.", metavar="N,...")
    block_size: int = option(16, "Tokens per block.", at_least=1)
    heads: Literal["shared", "separate"] = option(
        "shared", "One decision for all KV heads of a layer, or one for each."
    )
    rank: int = option(8, "Features of a key: the state of a KV head weighs as much as so many tokens.", at_least=1)
    middle: int = option(64, "Width of the maps: the file grows with it.", at_least=1)
    epochs: int = option(20, "How often the windows are gone through for each layer.", at_least=1)
    layers_at_once: int = option(
        4, "Fitted after one reading of the text: more are faster and take more memory.", at_least=1
    )


class FoldOptions(FitOptions, KernelOptions, ModelOptions):
    """What was typed."""

    tokens: int = option(65536, "To read, in all; more make better maps.", at_least=1)
    window: int = option(1024, "Tokens per window: as long as the texts that matter, and longer than the budgets.")
