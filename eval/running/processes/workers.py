"""Processes beside this one that share its work, with one torch thread each: on small models faster than threads."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch

from ...caches.plugins import load_plugins
from ...errors import UserError
from ...options.settings import EMBEDDED, Settings
from .worker import begin

S = TypeVar("S", bound=Settings, contravariant=True)
J = TypeVar("J", contravariant=True)
POLL_SECONDS = 0.2


class RunJob(Protocol[S, J]):
    """A function of the module level: runs one job and yields rows as they are finished, without those `done`.

    Of rows that take long it tells in between, see `tell`.
    """

    def __call__(self, model: Any, tokenizer: Any, settings: S, job: J, done: Set[Any], /) -> Iterator[Any]: ...


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


#: Takes what `tell` is told.
LISTENER: ContextVar[Callable[[Reading], None] | None] = ContextVar("LISTENER", default=None)


def tell(reading: Reading) -> None:
    """Say how far rows are, from inside a job."""
    if listener := LISTENER.get():
        listener(reading)


def default_workers(settings: Settings, jobs: int) -> int:
    """Two processes for the embedded model on a CPU; one for anything that a machine may hold only once."""
    if settings.model != EMBEDDED or settings.device != "cpu":
        return 1
    return max(1, min(2, os.cpu_count() or 1, jobs))


class Workers:
    """Processes beside this one, ended with the context.

    Args:
        work: a function of the module level.
        arguments: of each process.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._work, self._arguments = work, arguments
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Workers:
        if not self._arguments:
            return self
        # Children read these when they import torch.
        os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        context = multiprocessing.get_context("spawn")
        for arguments in self._arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=begin, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            ours.send((_work, (self._work, arguments)))
            self._running.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._running:
            process.terminate()
        for process, _pipe in self._running:
            process.join()
        if self._arguments:
            torch.set_num_threads(self._threads)

    def check(self) -> bool:
        """Whether all are done.

        Raises:
            UserError: one made a mistake, or was killed.
        """
        for process, pipe in self._running:
            if process.exitcode:
                raise UserError(_said(pipe))
        return all(process.exitcode == 0 for process, _ in self._running)

    def wait(self, tick: Callable[[], None]) -> None:
        """Until all are done; `tick` is called again and again."""
        while not self.check():
            tick()
            time.sleep(POLL_SECONDS)


def _said(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except (EOFError, OSError):
        return (
            "a worker process was killed, perhaps for want of memory: the same command continues; "
            "--workers 1 takes the least memory"
        )


def _work(pipe: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        load_plugins(())
        work(*arguments)
    except UserError as error:
        pipe.send(str(error))
        sys.exit(2)
    except Exception:
        # Tracebacks do not travel between processes.
        pipe.send(f"in a worker process:\n{traceback.format_exc()}")
        sys.exit(1)
