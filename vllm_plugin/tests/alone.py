"""What `PagedEvictionCache` alone gives, with the chunks that vLLM has read."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged_eviction import CacheOptions, PagedEvictionCache
from hf_paged_eviction.internals import FixedAllocator, shown_queries


def cache_of(config: Any, options: dict[str, Any]) -> PagedEvictionCache:
    """The cache of one request; the allocator is one that is served."""
    cache = PagedEvictionCache(config, **vars(CacheOptions(**options)))
    if "allocator" not in options and not isinstance(cache.allocator, FixedAllocator):
        cache = PagedEvictionCache(config, **vars(CacheOptions(**options, allocator="uniform")))
    return cache


@torch.no_grad()
def answer(model: Any, options: dict[str, Any], tokens: Sequence[int], chunks: Sequence[int], new: int) -> list[int]:
    """The tokens that follow, greedily.

    Args:
        tokens: the prompt, and what of the answer was read as part of it after a preemption.
        chunks: how they are cut.
        new: number of tokens to generate.
    """
    assert sum(chunks) == len(tokens)
    cache, start, found = cache_of(model.config, options), 0, []
    for count in chunks:
        ids = torch.tensor([tokens[start : start + count]])
        logits = model(input_ids=ids, past_key_values=cache).logits[0, -1]
        start += count
    for _ in range(new):
        found.append(int(logits.argmax()))
        if len(found) < new:
            logits = model(input_ids=torch.tensor([[found[-1]]]), past_key_values=cache).logits[0, -1]
    return found


__all__ = ["answer", "cache_of", "shown_queries"]
