"""Processes of their own that start at once: a parent that has imported what costs seconds forks them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

_PARENT = """
import importlib, json, os, signal, sys, traceback
import matplotlib.figure, matplotlib.legend, torch
torch.set_num_threads(1)
matplotlib.figure.Figure.savefig = lambda figure, path, **how: path.write_bytes(b"")
matplotlib.figure.Figure.tight_layout = lambda figure: None
matplotlib.legend.Legend.get_window_extent = lambda legend, renderer=None: legend.figure.bbox
# What each run would import, read or compile anew.
from transformers.models.llama import modeling_llama
from transformers import conversion_mapping
getattr(conversion_mapping, "get_checkpoint_conversion_mapping", str)("llama")
from hf_paged_eviction import available_allocators, available_policies
available_policies(), available_allocators()
from hf_paged_eviction_eval import commands
from hf_paged_eviction_eval.report import report
from hf_paged_eviction_eval.running import evaluation, terminal
from hf_paged_eviction_eval.tables import grids, plot, terminal as tables_of_a_terminal
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if not child:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(job["environment"])
        if job["bytes"]:
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["bytes"], job["bytes"]))
            if job["deadly"]:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        status = 1
        try:
            module, _, name = job["main"].partition(":")
            status = getattr(importlib.import_module(module), name)(job["arguments"]) or 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(child, flush=True)
"""


def in_processes(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of so many processes, which have torch and transformers and
    nothing of ours; raises what it raises there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    with context.Pool(count) as pool:
        return pool.starmap_async(function, [(rank, *arguments) for rank in range(count)], chunksize=1).get(300)


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
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        arguments: Sequence[str],
        most_bytes: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        main: str = "hf_paged_eviction_eval.commands:app",
        deadly: bool = False,
    ) -> Child:
        """Start the command, or what `main` names; with `most_bytes`, no file may grow beyond: the disk is full, or,
        if that is `deadly`, the process is killed at that byte."""
        self.started += 1
        log = self.folder / f"log{self.started}"
        job = {
            "arguments": list(arguments),
            "log": str(log),
            "bytes": most_bytes,
            "deadly": deadly,
            "environment": dict(environment),
            "main": main,
        }
        return Child(self, self.ask(job), log)

    def ask(self, job: dict[str, Any]) -> int:
        """The parent's answer: the id of a child that was started, or its exit status."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(job) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def run(self, arguments: Sequence[str], most_bytes: int = 0, deadly: bool = False) -> tuple[int, str]:
        """Exit status and output."""
        child = self.start(arguments, most_bytes, deadly=deadly)
        return child.wait(), child.output

    def close(self) -> None:
        """End the parent."""
        self._parent.kill()
        self._parent.communicate()


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
