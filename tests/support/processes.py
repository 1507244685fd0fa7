"""Processes of their own that start at once: a parent that has imported what costs seconds forks them."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from homes import PROFILES


def _forkserver() -> ForkServerContext:
    """Its processes have torch and transformers and nothing of ours."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    return context


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of so many processes; raises what it raises there."""
    with _forkserver().Pool(count) as pool:
        return pool.starmap_async(function, [(rank, *arguments) for rank in range(count)], chunksize=1).get(300)


def _answer_jobs(connection: Connection) -> None:
    """The parent of commands: forks one for each job, waits for one when told, and ends with the tests."""
    _import_what_commands_need()
    with suppress(EOFError):
        while True:
            job = connection.recv()
            if "wait" in job:
                connection.send(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]))
            elif child := os.fork():
                connection.send(child)
            else:
                _run_job(job)


def _import_what_commands_need() -> None:
    """What each run would import, read or compile anew; and pictures stay empty."""
    import matplotlib.figure
    import matplotlib.legend
    import torch
    from transformers import conversion_mapping

    from hf_paged_eviction import available_allocators, available_policies
    from hf_paged_eviction_eval.data import library

    torch.set_num_threads(1)
    figure: Any = matplotlib.figure.Figure
    figure.savefig = lambda self, file, **how: None
    figure.tight_layout = lambda self: None
    legend: Any = matplotlib.legend.Legend
    legend.get_window_extent = lambda self, renderer=None: self.figure.bbox
    getattr(conversion_mapping, "get_checkpoint_conversion_mapping", str)("llama")
    available_policies(), available_allocators()
    ours = "commands report.page report.tables report.plots running.evaluation running.terminal"
    for name in ours.split():
        importlib.import_module(f"hf_paged_eviction_eval.{name}")
    for name in library.FILLER:
        library.filler_lines(name)


def _run_job(job: dict[str, Any]) -> NoReturn:
    """In the child."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environment"])
    if job["bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["bytes"], job["bytes"]))
        if job["deadly"]:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    status: Any = 1
    try:
        module, _, name = job["main"].partition(":")
        status = getattr(importlib.import_module(module), name)(job["arguments"]) or 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Child:
    """One run of the command."""

    def __init__(self, parent: Commands, pid: int, log: Path) -> None:
        self._parent, self.pid, self.log = parent, pid, log

    def kill(self) -> None:
        """SIGKILL: nothing of it gets to say good-bye."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit status; negative for a signal."""
        return self._parent.ask({"wait": self.pid})

    @property
    def output(self) -> str:
        """What it printed."""
        return self.log.read_text("utf-8")


class Commands:
    """Starts `paged-eviction`, as often as one likes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        context = _forkserver()
        self._connection, connection = context.Pipe()
        self._parent = context.Process(target=_answer_jobs, args=(connection,))
        self._parent.start()
        connection.close()

    def start(
        self,
        arguments: Sequence[str],
        most_bytes: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        main: str = "hf_paged_eviction_eval.commands:main",
        deadly: bool = False,
    ) -> Child:
        """Start the command, or what `main` names; with `most_bytes`, no file may grow beyond: the disk is full, or,
        if that is `deadly`, the process is killed at that byte."""
        self.started += 1
        log = self.folder / f"log{self.started}"
        log.touch()
        job = {
            "arguments": arguments if isinstance(arguments, str) else list(arguments),
            "log": str(log),
            "bytes": most_bytes,
            "deadly": deadly,
            "environment": {PROFILES: os.environ[PROFILES], **environment},
            "main": main,
        }
        return Child(self, self.ask(job), log)

    def ask(self, job: dict[str, Any]) -> int:
        """The parent's answer: the id of a child that was started, or its exit status."""
        self._connection.send(job)
        return int(self._connection.recv())

    def run(self, arguments: Sequence[str], most_bytes: int = 0, deadly: bool = False) -> tuple[int, str]:
        """Exit status and output."""
        child = self.start(arguments, most_bytes, deadly=deadly)
        return child.wait(), child.output

    def close(self) -> None:
        """End the parent."""
        self._connection.close()
        self._parent.kill()
        self._parent.join()


def raw_rows(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of every process, just as it is."""
    files = [path.read_bytes().split(b"\n")[:-1] for path in sorted(folder.glob("rows.*.jsonl"))]
    return [json.loads(line) for lines in files for line in lines]


def meta_of(folder: Path) -> dict[str, Any]:
    """What was written down of the last command."""
    content: dict[str, Any] = json.loads(sorted(folder.glob("run.*.json"))[-1].read_text("utf-8"))
    return content


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows in a fixed order, without what no two runs have in common."""
    rows = raw_rows(folder)
    for row in rows:
        row.pop("efficiency", None)
        row.pop("settings")
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else; a process of ours may listen there, until then nobody does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def wait_for(condition: Any, seconds: float = 300, every: float = 0.005) -> None:
    """Wait until this is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)
