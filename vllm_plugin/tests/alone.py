"""What `PagedEvictionCache` alone gives, with the chunks that vLLM has read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import CacheOptions, PagedEvictionCache
from hf_paged_eviction.internals import FixedAllocator, rank_keys, shown_queries
from hf_paged_eviction.layer import overflow
from hf_paged_eviction.table import victims


def cache_of(config: Any, options: dict[str, Any]) -> PagedEvictionCache:
    """The cache of one request; the allocator is one that is served."""
    cache = PagedEvictionCache(config, **vars(CacheOptions(**options)))
    if "allocator" not in options and not isinstance(cache.allocator, FixedAllocator):
        cache = PagedEvictionCache(config, **vars(CacheOptions(**options, allocator="uniform")))
    return cache


@dataclass(frozen=True)
class Rounding:
    """Keys and values in a type of 8 bits, divided by a scale each.

    Attributes:
        cut: whether they are rounded towards zero, as vLLM's kernels for CPUs do; False = to the nearest number.
    """

    dtype: torch.dtype
    keys: float = 1.0
    values: float = 1.0
    cut: bool = True

    def __call__(self, states: Tensor, scale: float) -> Tensor:
        most = torch.finfo(self.dtype).max
        wanted = (states.float() / scale).clamp(-most, most)
        codes = wanted.to(self.dtype)
        if self.cut:
            above = codes.float().abs() > wanted.abs()
            codes = (codes.view(torch.uint8) - above.byte()).view(self.dtype)
        return (codes.float() * scale).to(states.dtype)

    def apply(self, cache: PagedEvictionCache) -> None:
        """Let a cache hold rounded keys and values."""
        update = cache.update
        cache.update = lambda keys, values, *more, **named: update(  # type: ignore[method-assign]
            self(keys, self.keys), self(values, self.values), *more, **named
        )


@contextmanager
def moved_scores(part: float) -> Iterator[None]:
    """Caches move all scores by this part of their size before they round and rank them.

    vLLM computes keys with other kernels, so their last bits differ from those of a cache alone. A score half-way
    between two levels may come to either, and of two tokens another one goes. If so, a cache alone does the same with
    scores that are moved by as little.
    """

    def moved(scores: Tensor, positions: Tensor, valid: Tensor, absolute_noise: bool = False) -> Tensor:
        usable, sizes = valid & scores.isfinite(), scores.abs()
        if absolute_noise:
            sizes = sizes.where(usable, 0.0).sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp_min(1)
        return rank_keys(scores + part * sizes, positions, valid, absolute_noise)

    with pytest.MonkeyPatch.context() as patch:
        if part:
            for module in (overflow, victims):
                patch.setattr(module, "rank_keys", moved)
        yield


@torch.no_grad()
def feed(model: Any, tokens: Sequence[int], cache: Any) -> int:
    """The token that follows these."""
    return int(model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache).logits[0, -1].argmax())


@torch.no_grad()
def answer(
    model: Any,
    options: dict[str, Any],
    tokens: Sequence[int],
    chunks: Sequence[int],
    new: int,
    rounding: Rounding | None = None,
) -> list[int]:
    """The tokens that follow, greedily.

    Args:
        tokens: the prompt, and what of the answer was read as part of it after a preemption.
        chunks: how they are cut.
        new: number of tokens to generate.
        rounding: of keys and values; None = they are not rounded.
    """
    assert sum(chunks) == len(tokens)
    cache, start, found = cache_of(model.config, options), 0, []
    if rounding is not None:
        rounding.apply(cache)
    for count in chunks:
        token = feed(model, tokens[start : start + count], cache)
        start += count
    for _ in range(new):
        found.append(token)
        if len(found) < new:
            token = feed(model, found[-1:], cache)
    return found


__all__ = ["Rounding", "answer", "cache_of", "feed", "moved_scores", "shown_queries"]
