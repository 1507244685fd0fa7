"""What a step takes besides its time: bytes that it cannot avoid to read, memory on top, shares inside the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import PagedLayer

from ..running.efficiency import Stopwatch, UpdateTime, timed_updates
from .decoder import Decoder

#: Larger than the caches of today's processors.
_CPU_COPY, _CUDA_COPY = 2**28, 2**30


def weight_bytes(model: Any, rows: int) -> int:
    """Bytes of the parameters that one decoded token per row reads.

    Every parameter counts once. Of the input embeddings, if they are not the output embeddings too, only one line per
    row counts.
    """
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight.data_ptr() == table.data_ptr()
    sizes = {parameter.data_ptr(): parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    if not tied:
        sizes[table.data_ptr()] = min(rows, table.shape[0]) * table.shape[1] * table.element_size()
    return sum(sizes.values())


def state_bytes(cache: Any) -> int:
    """Bytes of keys and values that attention reads at a step: all that a layer hands over, over rows and layers."""
    total = 0
    for layer in cache.layers:
        for state in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(state, Tensor) and state.dim() == 4:
                # A PagedLayer hands over the slots in use, a static one all of them.
                partly = isinstance(layer, PagedLayer) and not layer.is_compileable
                used = min(layer.held, state.shape[2]) if partly else state.shape[2]
                total += state[:, :, :1].numel() * used * state.element_size()
    return total


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy moves, read and written bytes both counted; median of several."""
    count = _CUDA_COPY if device.type == "cuda" else _CPU_COPY
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    watch, times = Stopwatch(device), []
    for _ in range(7):
        watch.lap()
        target.copy_(source)
        times.append(watch.lap())
    return 2 * count / median(times)


# ---- memory ---------------------------------------------------------------------------------------------------------


def growth(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that torch allocated on a CUDA device during `run`, above the level at its start; None elsewhere."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


# ---- shares ---------------------------------------------------------------------------------------------------------

_RUNS = 5


def measure_shares(decoder: Decoder, steps: int, compiled: bool) -> tuple[float | None, float | None]:
    """The shares of a step that are spent in `cache.update` and in choosing victims; None if they cannot be measured.

    Args:
        steps: whole blocks, for a cache that evicts; then the median of several runs counts.
    """
    cache, times = decoder.held.cache, []
    for _ in range(_RUNS if isinstance(cache, PagedEvictionCache) else 1):
        clocked = nullcontext() if compiled else timed_updates(cache)
        with clocked as updates, _timed_choices(cache, decoder.model.device) as choices:
            seconds = decoder.run(steps)
        times.append([None if spent is None else spent.seconds / seconds for spent in (updates, choices)])
    update, choice = (None if None in column else median(column) for column in zip(*times, strict=True))
    return update, choice


@contextmanager
def _timed_choices(cache: DynamicCache, device: torch.device) -> Iterator[UpdateTime | None]:
    """Measure the choices of victims inside this block; None where there are none."""
    if not isinstance(cache, PagedEvictionCache) or not cache.paged_layers:
        yield None
        return
    spent, plan = UpdateTime(), cache.paged_layers[0][1].plan
    plan.surround(partial(spent.clock, device))
    try:
        yield spent
    finally:
        plan.surround(nullcontext)
