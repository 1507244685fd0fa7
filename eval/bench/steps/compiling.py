"""The forward, compiled as `generate` compiles it for a static cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import counters

#: Caches of one run that share the code of the forward, far more than anybody has in one process.
_GRAPHS = 64


def compiled(model: Any) -> Callable[..., Any]:
    """One full graph of static shapes; CUDA graphs on CUDA."""
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return torch.compile(model.forward, fullgraph=True, dynamic=False, mode=mode)


def graphs() -> int:
    """Graphs compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def room_for_graphs() -> Iterator[None]:
    """Many caches in one process do not reach the limit of recompilations; all graphs are forgotten afterwards."""
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    try:
        with config.patch({name: _GRAPHS}):
            yield
    finally:
        torch._dynamo.reset()
