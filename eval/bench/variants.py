"""What is compared: caches that hold the whole context, caches of C tokens, and this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import PAGED_EVICTION

from ..caches.making import profile_noted
from .settings import BenchSettings

FULL, FLOOR, PAGED = "full", "floor", "paged"
FULL_COMPILED, FLOOR_COMPILED = "full_compiled", "floor_compiled"
PAGED_STATIC, PAGED_STATIC_OWN = "paged_static", "paged_static_own"
#: This cache with a compiled step.
STATIC = (PAGED_STATIC, PAGED_STATIC_OWN)
#: What each of them is says `paged-eviction bench --help`.
VARIANTS = (FULL, FLOOR, PAGED, FULL_COMPILED, FLOOR_COMPILED, *STATIC)
#: Those that hold C tokens whatever the context, and those for which the model's forward is compiled.
FLOORS, COMPILED = {FLOOR, FLOOR_COMPILED}, {FULL_COMPILED, FLOOR_COMPILED, *STATIC}


@dataclass
class Held:
    """A cache, not yet filled.

    Attributes:
        filled: tokens to fill it with.
        seen: the position of the next token.
        rewinds: whether it grows, and has to be taken back before every timing.
        around: entered around decoding.
    """

    cache: Any
    filled: int
    seen: int
    rewinds: bool
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def make_cache(name: str, model: Any, settings: BenchSettings, budget: int, batch: int, context: int | None) -> Held:
    """The cache of a variant.

    Args:
        context: tokens; None for the floors.
    """
    config, steps = model.config, settings.steps
    length = budget if context is None else context
    if name == FULL:
        return Held(DynamicCache(config=config), length, length, rewinds=True)
    if name == FLOOR:  # holds C tokens on the average of a timing
        return Held(DynamicCache(config=config), budget - steps // 2, budget - steps // 2, rewinds=True)
    if name == FULL_COMPILED:
        return Held(StaticCache(config=config, max_cache_len=length + steps), length, length, rewinds=True)
    if name == FLOOR_COMPILED:  # attention reads all C slots, used or not
        return Held(StaticCache(config=config, max_cache_len=budget), budget - steps, budget - steps, rewinds=True)
    around = partial(own_attention, model) if name == PAGED_STATIC_OWN else nullcontext
    with around():
        cache = paged_cache(model, settings, budget, name in STATIC, batch, length)
    return Held(cache, length, length, rewinds=False, around=around)


def paged_cache(model: Any, settings: BenchSettings, budget: int, static: bool, batch: int, length: int) -> Any:
    """This cache, told that no row has pads."""
    mask = torch.ones(batch, length, dtype=torch.long, device=model.device)
    extra: dict[str, Any] = {"static": True} if static else {}
    options = {"budget": budget, "policy": settings.policy, "attention_mask": mask, **settings.cache_arguments, **extra}
    with profile_noted():
        return PagedEvictionCache(model.config, **options)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """The attention implementation of this package inside of a block; the model's own one again behind it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(PAGED_EVICTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
