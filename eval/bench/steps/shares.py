"""Shares of a step's time inside the cache.

Measured in runs of their own, apart from the timings, by a clock around two calls: `cache.update` of every layer, and
the choice of victims (scores, ranking, the next block). `update` is a part of a compiled step, where no clock can be
put; a static cache chooses its victims between the steps. For a cache that evicts, the median of several runs counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache

from ...running.efficiency import UpdateTime, timed_updates
from .decoder import Decoder

_RUNS = 5


class Shares(NamedTuple):
    """Shares of the time of a step; None where it cannot be told."""

    cache: float | None
    eviction: float | None


def measure_shares(decoder: Decoder, steps: int, compiled: bool) -> Shares:
    """Shares over `steps` decoded tokens: whole blocks for a cache that evicts."""
    runs = _RUNS if isinstance(decoder.held.cache, PagedEvictionCache) else 1
    rounds = [_measure(decoder, steps, compiled) for _ in range(runs)]
    return Shares(*(None if None in column else median(column) for column in zip(*rounds, strict=True)))


def _measure(decoder: Decoder, steps: int, compiled: bool) -> Shares:
    cache = decoder.held.cache
    clocked = nullcontext() if compiled else timed_updates(cache)
    with clocked as updates, _timed_choices(cache, decoder.model.device) as choices:
        seconds = decoder.run(steps)
    return Shares(updates.seconds / seconds if updates else None, choices.seconds / seconds if choices else None)


@contextmanager
def _timed_choices(cache: DynamicCache, device: torch.device) -> Iterator[UpdateTime | None]:
    """Measure the choices of victims inside this block; None where there are none."""
    if not isinstance(cache, PagedEvictionCache) or not cache.paged_layers:
        yield None
        return
    spent, layer_groups = UpdateTime(), cache.paged_layers[0][1].layer_groups
    layer_groups.surround(partial(spent.clock, device))
    try:
        yield spent
    finally:
        layer_groups.surround(nullcontext)
