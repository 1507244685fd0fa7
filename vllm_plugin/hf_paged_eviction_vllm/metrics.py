"""Counters of the scheduler, shown by vLLM's own `/metrics`.

The scheduler runs in another process than the HTTP server, and vLLM passes on its own statistics only. So the numbers
lie in a small file that both map; the process that first loads the plugin makes it, and the others inherit its name.
"""

import atexit
import mmap
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

#: Name of the environment variable with the path of the file.
VARIABLE = "PAGED_EVICTION_COUNTERS"

#: By name: whether it only grows, and what it counts.
METRICS = {
    "tokens_evicted": (True, "Tokens evicted per layer, of all requests."),
    "blocks_freed": (True, "Blocks that were freed while their request went on."),
    "blocks_held": (False, "Blocks that running and waiting requests hold."),
    "snapshots": (True, "Snapshots kept of requests that have ended, or of a beginning that many share."),
    "snapshot_hits": (True, "Requests that began with a snapshot."),
    "tokens_not_read_again": (True, "Tokens of requests that a snapshot held already."),
}


class Counters:
    """The numbers, in the order of `METRICS`.

    Args:
        path: the file; None = they are not shown.
    """

    def __init__(self, path: str | None) -> None:
        self._numbers = np.zeros(len(METRICS), dtype=np.int64)
        if path is not None and Path(path).is_file():
            with open(path, "r+b") as file:
                self._numbers = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)

    def add(self, name: str, count: int) -> None:
        """Count."""
        self._numbers[list(METRICS).index(name)] += count

    def put(self, name: str, number: int) -> None:
        """Set what may shrink."""
        self._numbers[list(METRICS).index(name)] = number

    def read(self) -> dict[str, int]:
        """All numbers, by name."""
        return dict(zip(METRICS, self._numbers.tolist(), strict=True))


@cache
def make_file() -> None:
    """Make the file, unless a parent process has, and show it. Called in every process of vLLM, of which one serves
    `/metrics`."""
    if VARIABLE not in os.environ:
        handle, path = tempfile.mkstemp(prefix="vllm-paged-eviction-")
        os.write(handle, bytes(8 * len(METRICS)))
        os.close(handle)
        os.environ[VARIABLE] = path
        atexit.register(_remove, path, os.getpid())
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector(counters()))


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:
        Path(path).unlink(missing_ok=True)


def counters() -> Counters:
    """The counters of this server."""
    return Counters(os.environ.get(VARIABLE))


class _Collector:
    def __init__(self, of: Counters) -> None:
        self._counters = of

    def describe(self) -> list[Any]:
        return []  # none is shown before something was counted

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        numbers = self._counters.read()
        if any(numbers.values()):
            for name, (grows, meaning) in METRICS.items():
                kind = CounterMetricFamily if grows else GaugeMetricFamily
                yield kind(f"vllm:paged_eviction_{name}", meaning, value=numbers[name])
