"""Bytes that a step cannot avoid to read, and how fast this device moves bytes."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import PagedLayer

from ...running.efficiency import Stopwatch

#: Larger than the caches of today's processors.
_CPU_COPY, _CUDA_COPY = 2**28, 2**30


def weight_bytes(model: Any, rows: int) -> int:
    """Bytes of the parameters that one decoded token per row reads.

    All of them once, but of a table of input embeddings that nothing else uses only one line per row.
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


def copy_bandwidth(device: torch.device, size: int | None = None, rounds: int = 7) -> float:
    """Bytes per second that a large copy moves, read and written bytes both counted; median of several.

    Args:
        size: bytes of the source; None is large enough that no cache of the device holds it.
    """
    count = size or (_CUDA_COPY if device.type == "cuda" else _CPU_COPY)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    watch, times = Stopwatch(device), []
    for _ in range(rounds):
        watch.lap()
        target.copy_(source)
        times.append(watch.lap())
    return 2 * count / median(times)


def share_of_limit(bytes_per_step: int, bandwidth: float, seconds: float) -> float:
    """The time that moving the bytes takes at that bandwidth, as a share of the step's."""
    return bytes_per_step / bandwidth / seconds
