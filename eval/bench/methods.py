"""The caches that PagedEviction (arXiv 2509.04377) was compared with, each as it was published.

Baselines evict one token after the other while decoding; PagedEviction evicts a block when the newest is full. What the
paper measured is what users of vLLM saw; here all of them run in transformers, on the same storage.
"""

from __future__ import annotations

from typing import Any

_TOKEN_BY_TOKEN = {"block_size": 1, "recent_tokens": None}
#: Settings of the caches, by the name of the variant.
METHODS: dict[str, dict[str, Any]] = {
    **{f"paged_{size}": {"policy": "paged_eviction", "block_size": size} for size in (8, 16, 32)},
    "streaming_llm": {"policy": "streaming_llm", **_TOKEN_BY_TOKEN, "sink_tokens": 4},
    "keydiff": {"policy": "keydiff", **_TOKEN_BY_TOKEN},
    "key_norm": {"policy": "key_norm", **_TOKEN_BY_TOKEN},
}
