"""Shares of a step's time inside the cache. The one file that knows where the cache chooses its victims.

Measured in runs of their own, apart from the timings, by a clock around two calls: `cache.update` of every layer, and
the choice of victims (scores, ranking, the next block). `update` is a part of a compiled step, where no clock can be
put; a static cache chooses its victims between the steps. For a cache that evicts, the median of several runs counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer_group import LayerGroup
from hf_paged_eviction.merged_table import MergedTable

from ..running.efficiency import UpdateTime, timed_updates
from .decoder import Decoder

#: Who scores what is new and chooses the next block to be overwritten, and by which method: the first calls the second,
#: but for a static cache.
_CHOICES = ((LayerGroup, "choose_victims"), (MergedTable, "choose_victims"))


_RUNS = 5


class Shares(NamedTuple):
    """Shares of the time of a step; None where it cannot be told."""

    cache: float | None
    eviction: float | None


def measure_shares(decoder: Decoder, steps: int, compiled: bool) -> Shares:
    """Shares over `steps` decoded tokens: whole blocks for a cache that evicts."""
    runs = _RUNS if isinstance(decoder.held.cache, PagedEvictionCache) else 1
    found = [_measure(decoder, steps, compiled) for _ in range(runs)]
    return Shares(*(None if None in column else median(column) for column in zip(*found, strict=True)))


def _measure(decoder: Decoder, steps: int, compiled: bool) -> Shares:
    cache = decoder.held.cache
    clocked = nullcontext() if compiled else timed_updates(cache)
    with clocked as updates, _timed_choices(decoder.model.device) as choices:
        seconds = decoder.run(steps)
    evicts = isinstance(cache, PagedEvictionCache)
    return Shares(updates.seconds / seconds if updates else None, choices.seconds / seconds if evicts else None)


@contextmanager
def _timed_choices(device: torch.device) -> Iterator[UpdateTime]:
    spent, place, inside = UpdateTime(), torch.empty(0, device=device), False

    def clocked(choose: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return choose(*args, **kwargs)
            inside = True
            try:
                return spent.measure(lambda _: choose(*args, **kwargs), place)
            finally:
                inside = False

        return call

    with ExitStack() as stack:
        for owner, name in _CHOICES:
            stack.enter_context(patch.object(owner, name, clocked(getattr(owner, name))))
        yield spent
