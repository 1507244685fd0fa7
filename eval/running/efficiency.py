"""What an answer cost: time, memory, evictions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Stopwatch:
    """Seconds of work on a device, from one `lap` to the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last = self._now()

    def lap(self) -> float:
        """Wait for the device; seconds since the last call."""
        before, self._last = self._last, self._now()
        return self._last - before

    def _now(self) -> float:
        if self.device.type == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


@dataclass
class UpdateTime:
    """Time inside some part of a step, such as `cache.update`.

    On CUDA it records events, which are read at the end, so that no step waits for the device.
    """

    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def clock(self, device: torch.device) -> Iterator[None]:
        """Note how long the work inside this block takes the device."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(stream)
            self._events.append((start, end))
            return
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """The sum so far. On CUDA the device must have come to rest."""
        milliseconds = [float(start.elapsed_time(end)) for start, end in self._events]
        return self._seconds + sum(milliseconds) / 1000


@contextmanager
def timed_updates(cache: DynamicCache) -> Iterator[UpdateTime]:
    """Measure what the cache does inside this block."""
    spent, update = UpdateTime(), cache.update

    def timed(keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        with spent.clock(keys.device):
            return update(keys, *args, **kwargs)

    cache.update = timed
    try:
        yield spent
    finally:
        del cache.update


def process_bytes(name: str) -> int | None:
    """A size of this process as Linux counts it: "VmRSS", what it holds now, or "VmHWM", the most it held."""
    lines = [line for line in _STATUS.read_text("ascii", "replace").splitlines() if line.startswith(f"{name}:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


class PeakMemory:
    """The most memory taken since it was made: that of the CUDA devices, or of the process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._resettable = device.type == "cuda"
        if device.type == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        elif device.type == "cpu":
            with suppress(OSError):  # a system that does not reset the peak of a process
                _CLEAR.write_text("5", "ascii")
                self._resettable = True

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if not self._resettable:
            return None
        if self.device.type == "cuda":
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        return process_bytes("VmHWM")


def kv_bytes(cache: DynamicCache) -> int:
    """Bytes of keys and values, or of what stands for them, on the model's device, over all rows and layers."""
    if isinstance(cache, PagedEvictionCache):
        return cache.stats().device_bytes
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(state.numel() * state.element_size() for state in states if isinstance(state, Tensor))


def evicted_tokens(cache: DynamicCache, rows: int) -> list[int]:
    """Tokens evicted from each row, summed over layers; all rows of a batch go on until its longest answer ends."""
    layers = cache.paged_layers if isinstance(cache, PagedEvictionCache) else []
    by_layer = [layer.table.evicted_tokens.tolist() for _, layer in layers]
    return [sum(counts) for counts in zip(*by_layer, strict=True)] or [0] * rows
