"""What `fit-fold` is told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from .base import File, Numbers, option
from .model import ModelOptions


class FoldOptions(ModelOptions):
    """What was typed."""

    panel: ClassVar[str] = "What is folded"
    left_out: ClassVar[frozenset[str]] = frozenset({"attn_implementation"})

    output: Path = option(..., "The file to write.", metavar="FILE.safetensors", panel="The text")
    text: list[File] | None = option(
        None,
        "What the model reads: plain texts, or JSON lines with a field context or text. Best like that which it will "
        "read later, questions and answers included.",
        metavar="FILE...",
        panel="The text",
    )
    files: list[File] | None = option(None, "More of them.", metavar="[FILE...]", argument=True)
    tokens: int = option(65536, "To read, in all; more make better maps.", at_least=1, panel="The text")
    window: int = option(
        1024, "Tokens per window: as long as the texts that matter, and longer than the budgets.", panel="The text"
    )
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
