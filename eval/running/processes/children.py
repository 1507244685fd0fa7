"""Shards of a run as processes beside this one, a torch thread each: on small models faster than threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ...errors import UserError
from ...options.settings import EMBEDDED, Settings
from .child import VARIABLE

_POLL_SECONDS = 0.2


def default_workers(settings: Settings, jobs: int) -> int:
    """Two processes for the embedded model on a CPU; one for anything that a machine may hold only once."""
    if settings.model != EMBEDDED or settings.device != "cpu":
        return 1
    return max(1, min(2, os.cpu_count() or 1, jobs))


class Children:
    """Processes that compute shards of the run that a file describes. They end with the block.

    Args:
        run_file: see `options.run_file`.
        count: of all shards.
    """

    def __init__(self, run_file: Path, count: int) -> None:
        self._threads = torch.get_num_threads()
        command = [sys.executable, "-m", "hf_paged_eviction_eval", "eval", "--config", str(run_file), "--shard"]
        self._commands = {shard: [*command, f"{shard}/{count}"] for shard in range(1, count + 1)}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Children:
        self._folder = tempfile.TemporaryDirectory()
        return self

    def start(self, shards: Iterable[int]) -> None:
        """Start those that do not run yet.

        Args:
            shards: their numbers, from 1.
        """
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", VARIABLE: "1"}
        for command in [self._commands.pop(shard) for shard in shards if shard in self._commands]:
            torch.set_num_threads(1)
            number = len(self._running)
            with self._said(number, "out").open("wb") as out, self._said(number, "err").open("wb") as err:
                process = subprocess.Popen(
                    command, env={**os.environ, **one_thread}, stdin=subprocess.PIPE, stdout=out, stderr=err
                )
            self._running.append(process)

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
            process.communicate()
        self._folder.cleanup()
        torch.set_num_threads(self._threads)

    def _said(self, number: int, stream: str) -> Path:
        return Path(self._folder.name, f"{number}.{stream}")

    def check(self) -> bool:
        """Whether all are done.

        Raises:
            UserError: one made a mistake, or was killed.
        """
        for number, process in enumerate(self._running):
            if process.poll():
                raise UserError(
                    _reason(process.returncode, self._said(number, "err").read_text(errors="replace").strip())
                )
        return all(process.returncode == 0 for process in self._running)

    def wait(self, tick: Callable[[], None]) -> list[tuple[str, int]]:
        """Until all are done; `tick` is called again and again. Why rows are missing, and how many."""
        while not self.check():
            tick()
            time.sleep(_POLL_SECONDS)
        failures: list[tuple[str, int]] = []
        for number in range(len(self._running)):
            failures += [(reason, rows) for reason, rows in json.loads(self._said(number, "out").read_text())]
        return failures


def _reason(status: int, stderr: str) -> str:
    if status < 0:
        return (
            "a worker process was killed, perhaps for want of memory: the same command continues; "
            "--workers 1 takes the least memory"
        )
    return stderr.removeprefix("error: ") if status == 2 else f"in a worker process:\n{stderr}"
