"""Jobs in this process, or over several with one torch thread each: on small models faster than threads."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

import torch

from .environment import model_facts
from .errors import RowsFailed, UserError
from .models import load
from .plugins import load_plugins
from .settings import EMBEDDED, Settings
from .store.results import Row
from .worker import begin

S = TypeVar("S", bound=Settings, contravariant=True)
J = TypeVar("J", contravariant=True)
#: What is done, and the keys of its rows that are finished already.
Job = tuple[Any, Set[Any]]


class RunJob(Protocol[S, J]):
    """A function of the module level: runs one job and yields rows as they are finished, without those `done`.

    Of rows that take long it yields `Reading` in between or, from inside a function that yields nothing, calls `tell`.
    """

    def __call__(self, model: Any, tokenizer: Any, settings: S, job: J, done: Set[Any], /) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Loaded:
    """A process has its model."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """How far rows are that take long.

    Attributes:
        keys: of the rows.
        done, total: tokens of each.
        label: what runs.
    """

    keys: tuple[tuple[Any, ...], ...]
    done: int
    total: int
    label: str


@dataclass(frozen=True)
class Failed:
    """Rows that could not be computed; others go on."""

    keys: tuple[tuple[Any, ...], ...]
    reason: str


@dataclass(frozen=True)
class Idle:
    """A process waits for a job."""


#: Takes what `tell` is told in this process.
LISTENER: ContextVar[Callable[[Reading], None] | None] = ContextVar("LISTENER", default=None)


def tell(reading: Reading) -> None:
    """Say how far rows are, from inside a job."""
    if listener := LISTENER.get():
        listener(reading)


#: Finished rows, how far others are, rows that failed, or a model that stands ready.
Event = list[Row] | Reading | Failed | Loaded


def default_workers(settings: Settings, jobs: int) -> int:
    """Two processes for the embedded model on a CPU; one for anything that a machine may hold only once."""
    if settings.model != EMBEDDED or settings.device != "cpu":
        return 1
    return max(1, min(2, os.cpu_count() or 1, jobs))


def run_jobs(run: RunJob[Any, Any], settings: Settings, jobs: Sequence[Job], workers: int) -> Iterator[Event]:
    """Events of all jobs as they come, in no fixed order.

    Raises:
        UserError: the model cannot be loaded, or a process was killed.
    """
    if not jobs:
        return
    if workers > 1:
        yield from _run_in_processes(run, settings, jobs, min(workers, len(jobs)))
        return
    model, tokenizer = load(settings)
    yield Loaded(model_facts(model))
    for job, done in jobs:
        yield from _run_one(run, (model, tokenizer), settings, job, done)


def _run_one(
    run: RunJob[Any, Any], loaded: tuple[Any, Any], settings: Settings, job: Any, done: Set[Any]
) -> Iterator[Event]:
    try:
        yield from run(*loaded, settings, job, done)
    except RowsFailed as error:
        yield Failed(error.keys, error.reason)


def _run_in_processes(run: RunJob[Any, Any], settings: Settings, jobs: Sequence[Job], count: int) -> Iterator[Event]:
    # Children read these when they import torch.
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    context = multiprocessing.get_context("spawn")
    processes = []
    pipes: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=begin, args=(theirs,), daemon=True)
            process.start()
            ours.send((work, run, settings))
            # A pipe ends when nobody holds its other end: without this, a killed child would be waited for for ever.
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield from _distribute(pipes, jobs)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _distribute(pipes: list[Any], jobs: Sequence[Job]) -> Iterator[Event]:
    """Hand out the jobs, pass on what comes back, until all are done."""
    waiting = deque(jobs)
    working = list(pipes)
    while working:
        ready: list[Any] = wait(working)
        for pipe in ready:
            try:
                event = pipe.recv()
            except (EOFError, OSError):
                raise UserError(
                    "a worker process was killed, perhaps for want of memory: the same command continues; "
                    "--workers 1 takes the least memory"
                ) from None
            if isinstance(event, BaseException):
                raise event
            if not isinstance(event, Idle):
                yield event
            elif waiting:
                pipe.send(waiting.popleft())
            else:
                working.remove(pipe)


def work(pipe: Connection, run: RunJob[Any, Any], settings: Settings) -> None:
    """A child: load the model once, then do jobs until there are no more."""
    torch.set_num_threads(1)
    LISTENER.set(pipe.send)
    try:
        load_plugins(())
        loaded = load(settings)
        pipe.send(Loaded(model_facts(loaded[0])))
        while True:
            pipe.send(Idle())
            job, done = pipe.recv()
            for event in _run_one(run, loaded, settings, job, done):
                pipe.send(event)
    except (EOFError, BrokenPipeError):
        return
    except UserError as error:
        pipe.send(error)
    except Exception:
        # Tracebacks do not travel between processes.
        pipe.send(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
