"""The rows of one process of several, and how the main process knows that they are complete.

A process holds the lock of its shard for as long as it lives; when it has done its part it leaves a mark. So the main
process can tell one that is slow (lock held) from one that died (lock free, no mark), and waits for no dead one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import lock
from .results import Row, RowFile, cannot_write

POLL_SECONDS = 0.2


def rows_path(folder: Path, rank: int) -> Path:
    """Rows of a process; matches `results.SHARDS`."""
    return folder / f"results.rank{rank:05}.jsonl"


def lock_path(folder: Path, rank: int) -> Path:
    """Held while the process lives."""
    return folder / f".rank{rank:05}{lock.NAME}"


def mark_path(folder: Path, rank: int) -> Path:
    """Written when the process has done its part; removed when the main process has taken it."""
    return folder / f".rank{rank:05}.done"


def clear(folder: Path) -> None:
    """Remove what an earlier run left, its rows excepted.

    Raises:
        UserError: one of its processes is still alive.
    """
    for path in folder.glob(".rank*"):
        if path.name.endswith(lock.NAME) and lock.is_held(path):
            raise UserError(f"a process of an earlier run still writes to {folder}: end it, or choose another --output")
        path.unlink(missing_ok=True)


class Shard:
    """What one process, not the main one, writes. Enter it before the main process looks for it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._rows = RowFile(rows_path(folder, rank))
        self._held = ExitStack()

    def __enter__(self) -> Shard:
        try:
            self._held.enter_context(lock.held_file(lock_path(self.folder, self.rank)))
        except OSError as error:
            raise UserError(
                f"process {self.rank} cannot write to {self.folder} ({error.strerror or error}): the processes of a "
                "run, on whatever machine, need one folder that all of them see; choose another --output"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._held.close()
        lock_path(self.folder, self.rank).unlink(missing_ok=True)

    def append(self, rows: Iterable[Row]) -> None:
        """Add finished rows."""
        self._rows.append(rows)

    def finish(self, notes: dict[str, Any]) -> None:
        """Leave the mark with `notes` for the main process, and wait until it has taken the rows.

        Raises:
            UserError: the main process died.
        """
        self._rows.close()
        mark = mark_path(self.folder, self.rank)
        partial = mark.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(notes), "utf-8")
            partial.replace(mark)
        except OSError as error:
            raise cannot_write(mark, error) from error
        while mark.exists():
            if not lock.is_held(self.folder / lock.NAME) and mark.exists():
                raise UserError("the main process ended early; the same command continues")
            time.sleep(POLL_SECONDS)


@dataclass
class Others:
    """The other processes, seen from the main one."""

    folder: Path
    ranks: tuple[int, ...]
    _read: dict[int, tuple[int, int]] = field(default_factory=dict)

    def check(self) -> None:
        """Call this when all shards are open.

        Raises:
            UserError: they are not in this folder.
        """
        for rank in self.ranks:
            if not lock_path(self.folder, rank).exists() or not lock.is_held(lock_path(self.folder, rank)):
                raise UserError(
                    f"what process {rank} writes does not appear in {self.folder}: the processes of a run, on whatever "
                    "machine, need one folder that all of them see, with file locks; choose another --output"
                )

    def finished_rows(self) -> int:
        """Lines that they have written."""
        for rank in self.ranks:
            offset, lines = self._read.get(rank, (0, 0))
            with suppress(OSError), rows_path(self.folder, rank).open("rb") as file:
                file.seek(offset)
                content = file.read()
                self._read[rank] = (offset + len(content), lines + content.count(b"\n"))
        return sum(lines for _, lines in self._read.values())

    def wait(self, tick: Callable[[], None]) -> dict[int, dict[str, Any]]:
        """The notes of all processes that did their part; those that died are missing.

        Args:
            tick: called again and again while this waits.
        """
        notes: dict[int, dict[str, Any]] = {}
        waiting = list(self.ranks)
        while waiting:
            for rank in list(waiting):
                dead = not lock.is_held(lock_path(self.folder, rank))
                mark = mark_path(self.folder, rank)
                if mark.exists():  # looked at after the lock: what is written just before the end counts
                    notes[rank] = json.loads(mark.read_bytes())
                if dead or rank in notes:
                    waiting.remove(rank)
            tick()
            if waiting:
                time.sleep(POLL_SECONDS)
        return notes

    def dismiss(self) -> None:
        """Tell them that their rows were taken."""
        for rank in self.ranks:
            mark_path(self.folder, rank).unlink(missing_ok=True)
