"""Memory that decoding takes on top of what is held."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memory is watched from here"


def growth(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of tensors allocated during `run` above the level at its start; None where nothing tells.

    CUDA: `max_memory_allocated`. CPU: allocations and releases as the profiler of torch lists them, those of compiled
    code included; not what other libraries in the process take.

    Args:
        run: called twice on a CPU: the profiler knows only the size of what was allocated before its eyes.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    if device.type != "cpu":
        return None
    with no_messages(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
        with record_function(_MARK):
            run()
    return _highest(seen)


def _highest(seen: profile) -> int | None:
    results = getattr(seen.profiler, "kineto_results", None)
    if results is None:
        return None
    events = results.events()
    start = min((event.start_ns() for event in events if event.name() == _MARK), default=None)
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    level = highest = 0
    for moment, change in sorted(changes, key=lambda entry: entry[0]):
        if start is not None and moment >= start:
            level += change
            highest = max(highest, level)
    return highest if start is not None else None


@contextmanager
def no_messages() -> Iterator[None]:
    """The profiler's C++ tells of itself on the standard error, across the progress bar: not here."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
