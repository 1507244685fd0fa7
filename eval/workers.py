"""Batches over several processes, one torch thread each: on small models faster than threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Protocol, TypeVar

from .models import load
from .results import Row
from .settings import EMBEDDED, Settings

S = TypeVar("S", bound=Settings, contravariant=True)
J = TypeVar("J", contravariant=True)


class RunJob(Protocol[S, J]):
    """A function of the module level: runs one job and yields rows as they are finished, without those `done`."""

    def __call__(self, model: Any, tokenizer: Any, settings: S, job: J, done: Set[Any], /) -> Iterator[list[Row]]: ...


def default_workers(settings: Settings, jobs: int) -> int:
    """Two processes for the embedded model on a CPU; one for anything that a machine may hold only once."""
    if settings.model != EMBEDDED or settings.device != "cpu":
        return 1
    return max(1, min(2, os.cpu_count() or 1, jobs))


def run_jobs(run: RunJob[Any, Any], settings: Settings, jobs: Sequence[Any], workers: int) -> Iterator[list[Row]]:
    """Rows of all jobs as they are finished, in no fixed order."""
    if not jobs:
        return
    if workers == 1:
        model, tokenizer = load(settings)
        for job, done in jobs:
            yield from run(model, tokenizer, settings, job, done)
        return
    # Children read these when they import torch.
    limits = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(limits)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (settings,)) as pool:
        futures = [pool.submit(_run_one, run, settings, job, set(done)) for job, done in jobs]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_loaded: tuple[Any, Any] | None = None


def _start(settings: Settings) -> None:
    import torch

    global _loaded
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _loaded = load(settings)


def _end_with_parent() -> None:
    # A parent that is killed closes no pipe that its children would notice: they would wait for work for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_one(run: RunJob[Any, Any], settings: Settings, job: Any, done: Set[Any]) -> list[list[Row]]:
    if _loaded is None:
        raise RuntimeError("the process has no model")
    return list(run(*_loaded, settings, job, done))
