"""Caches from the options of a command, and models made ready for their policies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import AUTO, NO_PROFILE, UNKNOWN_WEIGHTS, Default, reads_profile

from ..errors import UserError
from ..options.cache import CacheOptions
from .policy_names import split_name


def make_paged_cache(config: Any, options: CacheOptions, name: str, label: str, **more: Any) -> PagedEvictionCache:
    """An empty cache.

    Args:
        name: of the policy, perhaps with @ and an allocator; "auto" alone is the default of the cache.
        label: of the budget, for errors.
        more: other arguments of `PagedEvictionCache`; they take precedence over the options.

    Raises:
        UserError: this policy or budget is impossible with this model.
    """
    scorer, allocator = split_name(name)
    try:
        named = {"policy": scorer, "allocator": None if name == AUTO else allocator}
        if not reads_profile(scorer, allocator):  # --profile is for those that do
            named["profile"] = None
        with profile_noted():
            return PagedEvictionCache(config, **{**options.cache_arguments, **named, **more})
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} {label}: {error}") from error


@contextmanager
def profile_noted() -> Iterator[None]:
    """Inside this block, the warning that a model has no profile becomes a note that names the command that makes one.

    Nothing is said before the weights are read, since a profile is found by them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if UNKNOWN_WEIGHTS in str(warning.message):
            continue
        if NO_PROFILE in str(warning.message):
            Console(stderr=True, soft_wrap=True).print(
                f"note: {NO_PROFILE} of this model is known: `paged-eviction prepare` makes one", markup=False
            )
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def policy_of(cache: PagedEvictionCache) -> str:
    """What a cache keeps tokens by, as commands write it: the policy, and an allocator that is not the uniform one."""
    return Default(cache.policy.label, cache.allocator.label).name


def empty_cache(config: Any, dtype: torch.dtype, **arguments: Any) -> PagedEvictionCache:
    """A cache for one row of a model on the meta device: it takes no memory, and tells its bytes and its budget.

    Args:
        config: of the decoder.
        dtype: of keys and values.
        arguments: of `PagedEvictionCache`.
    """
    cache = PagedEvictionCache(config, **arguments)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, width, dtype, torch.device("meta"))
    return cache
