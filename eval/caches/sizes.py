"""How many tokens a budget in bytes is: the model tells."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import feed

from ..errors import UserError
from ..models.device import input_device
from ..options.cache import CacheOptions
from .budgets import ORACLE, Budget
from .making import make_paged_cache
from .policy_names import split_name

#: By model: what was found, by policy, bytes and options.
_KNOWN: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def tokens_held(budget: Budget, model: Any, options: CacheOptions, policy: str, length: int) -> int | None:
    """Tokens held per layer and row; None for the full cache.

    Args:
        policy: with its allocator.
        length: tokens that a share is taken of.

    Raises:
        UserError: bytes that hold too little, or that this policy cannot be bounded by.
    """
    if budget.memory is None:
        return budget.resolve(length, options)
    return tokens_of_memory(model, options, policy, budget.memory, budget.label)


def tokens_of_memory(model: Any, options: CacheOptions, policy: str, memory: int, label: str) -> int:
    """Tokens per layer that one row has room for in so many bytes. A cache of one token shows how wide they are.

    Args:
        label: of the size, for errors.

    Raises:
        UserError: as `tokens_held`.
    """
    known = _KNOWN.setdefault(model, {})
    key = (policy, memory, model.dtype, tuple(options.cache_arguments.items()))
    if key not in known:
        scorer, allocator = split_name(policy)
        name = f"recency@{allocator}" if scorer == ORACLE else policy
        cache = make_paged_cache(model.config, options, name, label, budget=f"{memory}B")
        if not cache.paged_layers:
            raise UserError(f"{policy} {label}: no layer of this model keeps all that it has read: nothing takes bytes")
        try:
            known[key] = measured(model, cache)
        except ValueError as error:
            raise UserError(f"{policy} {label}: {error}") from error
    return known[key]


@torch.inference_mode()
def measured(model: Any, cache: PagedEvictionCache) -> int:
    """The budget in tokens of an empty cache with a budget in bytes, which it uses up.

    Raises:
        ValueError: too few bytes, or layers of unequal widths.
    """
    one = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    feed(model, one, torch.ones_like(one), cache)
    return cache.budget or 0
