"""How many tokens a budget in bytes is: a cache of one token shows how wide they are."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import AUTO, feed
from hf_paged_eviction.options.cache_options import budget_of_text

from ..errors import UserError
from ..models.device import input_device
from ..options.cache import CacheOptions
from .budgets import Budget
from .making import make_paged_cache

#: By model: arguments of caches, by policy, bytes and options.
_KNOWN: WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = WeakKeyDictionary()


def tokens_held(budget: Budget, model: Any, options: CacheOptions, policy: str, length: int) -> int | None:
    """Tokens held per layer and row; None for the full cache.

    Args:
        policy: with its allocator.
        length: tokens that a share is taken of.

    Raises:
        UserError: bytes that hold too little, or that this policy cannot be bounded by.
    """
    if not budget.in_bytes:
        return budget.resolve(length, options)
    tokens: int = arguments_of_memory(model, options, policy, budget, length)["budget"]
    return tokens


def arguments_of_memory(model: Any, options: CacheOptions, policy: str, budget: Budget, length: int) -> dict[str, Any]:
    """Arguments of a cache whose rows each have room for so many bytes, see `measured`.

    Args:
        budget: in bytes, or a share of memory.
        length: tokens that a share is taken of.

    Raises:
        UserError: as `tokens_held`.
    """
    measures, label = _KNOWN.setdefault(model, {}), budget.label
    size = budget_of_text(label, length, {})
    key = (policy, size, model.dtype, repr(options.cache_arguments))
    if key not in measures:
        cache = make_paged_cache(model.config, options, policy, label, budget=size, protect=None)
        if not cache.paged_layers:
            raise UserError(f"{policy} {label}: no layer of this model keeps all that it has read: nothing takes bytes")
        try:
            measures[key] = measured(model, cache, policy)
        except ValueError as error:
            raise UserError(f"{policy} {label}: {error}") from error
    return measures[key]


@torch.inference_mode()
def measured(model: Any, cache: PagedEvictionCache, policy: Any) -> dict[str, Any]:
    """Arguments of a cache that holds as many tokens as this empty one, whose budget is in bytes; it is used up.

    For the policy "auto" these are also the policy, the allocator and the bits that it chose for these bytes.

    Args:
        policy: that the cache was asked for.

    Raises:
        ValueError: too few bytes, or layers of unequal widths.
    """
    one = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    feed(model, one, torch.ones_like(one), cache)
    tokens = {"budget": cache.budget or 0}
    if policy != AUTO:
        return tokens
    sizes = cache.paged_layers[0][1].budget
    chosen = {"policy": cache.policy, "allocator": cache.allocator, "bits": cache.bits}
    ends = {"sink_tokens": sizes.protected, "recent_tokens": sizes.recent}
    return {**tokens, **chosen, **ends, "block_size": sizes.block_size}
