"""Names of the caches that are compared, and those of the PagedEviction paper (arXiv 2509.04377) as it published them.

Its baselines evict one token after the other while decoding; PagedEviction evicts a block when the newest is full.
What the paper measured is what users of vLLM saw; here all of them run in transformers, on the same storage.
"""

from __future__ import annotations

from typing import Any

FULL, FLOOR, PAGED, KVPRESS = "full", "floor", "paged", "kvpress"
FULL_COMPILED, FLOOR_COMPILED = "full_compiled", "floor_compiled"
PAGED_STATIC, PAGED_STATIC_OWN = "paged_static", "paged_static_own"
#: This cache with a compiled step.
STATIC = (PAGED_STATIC, PAGED_STATIC_OWN)
_TOKEN_BY_TOKEN = {"block_size": 1, "recent_tokens": None}
#: Settings of the caches, by the name of the variant.
METHODS: dict[str, dict[str, Any]] = {
    **{f"paged_{size}": {"policy": "paged_eviction", "block_size": size} for size in (8, 16, 32)},
    "streaming_llm": {"policy": "streaming_llm", **_TOKEN_BY_TOKEN, "sink_tokens": 4},
    "keydiff": {"policy": "keydiff", **_TOKEN_BY_TOKEN},
    "key_norm": {"policy": "key_norm", **_TOKEN_BY_TOKEN},
}
#: What each of them is says `paged-eviction bench --help`. The last are those that answers are measured with.
VARIANTS = (FULL, FLOOR, PAGED, KVPRESS, FULL_COMPILED, FLOOR_COMPILED, *STATIC)
ANSWERING = (FULL, FULL_COMPILED, PAGED, *STATIC, *METHODS)
#: What the paper reports of `PUBLISHED_WHERE`, read off its figures: tokens per second by variant.
PUBLISHED = {"full": 2200, "paged_16": 3020, "key_norm": 2170}
PUBLISHED_WHERE = "Llama-3.2-1B, budget 1,024, in vLLM on one A100 of 40 GB (arXiv 2509.04377)"
#: Model, budget, and tokens in and out that these numbers are about.
PUBLISHED_OF = ("llama-3.2-1b", 1024, 1024, 8192)


def published(model: str, row: dict[str, Any]) -> int | None:
    """Tokens per second in the paper, where it has the number."""
    held = PUBLISHED_OF[1] if row["budget"] is None else row["budget"]
    same = (model, held, row["input_tokens"], row["output_tokens"]) == PUBLISHED_OF
    return PUBLISHED.get(row["variant"]) if same else None
