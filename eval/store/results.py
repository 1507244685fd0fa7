"""A folder of results: rows appended as they are finished, and the settings they belong to.

Whatever ends a run (a killed process, a full disk), the folder can be read, and the same settings continue it: lines
are whole or cut off, files are replaced whole or not at all, and what was written twice counts once.

No database: processes of a run write to one folder from several machines, and the locks that SQLite needs for several
writers do not hold on network file systems. With a file per writer, as here, merging stays, and with it this code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from ..errors import UserError
from ..options.cache import CacheOptions
from ..options.evaluate import TaskOptions
from . import lock

Row = dict[str, Any]
#: What tells rows apart; raises KeyError or TypeError for what is no row.
KeyOf = Callable[[Row], tuple[Any, ...]]

#: Rows, settings and facts, and what the rows come to.
ROWS, META, SUMMARY = "results.jsonl", "run_meta.json", "summary.json"
#: Rows of the other processes of a run, until they are put into `ROWS`.
PARTS = "results.*.jsonl"
#: Seconds between two moments at which rows are forced to the disk: what a power cut may cost.
SYNC_SECONDS = 1.0


class RowFile:
    """Lines appended to one file; each group of rows is whole or, if the process dies in the middle, cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._synced = 0.0

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows and hand them to the operating system at once.

        Raises:
            UserError: they cannot be written; none of them is left in the file.
        """
        content, whole = b"".join(map(encode_row, rows)), None
        try:
            file = self._file = self._file or self._open()
            whole = file.seek(0, os.SEEK_END)
            written = file.write(content) or 0
            while written < len(content):  # a disk that fills takes a part first, and refuses the rest
                written += file.write(content[written:]) or 0
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            if self._file is not None:
                with suppress(OSError), self._file as file:
                    if whole is not None:
                        os.ftruncate(file.fileno(), whole)
                self._file = None
            raise cannot_write(self.path, error) from error

    def _open(self) -> BinaryIO:
        """Without half a line at the end, which a process that was killed or a full disk left."""
        file = self.path.open("a+b", buffering=0)
        if file.seek(0, os.SEEK_END):
            file.seek(0)
            if not (content := file.read()).endswith(b"\n"):
                os.ftruncate(file.fileno(), content.rfind(b"\n") + 1)
        return file

    def close(self) -> None:
        """Force everything to the disk."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                with file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise cannot_write(self.path, error) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, whenever this process ends.

    Raises:
        UserError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


class ResultFolder:
    """Rows in JSON-lines files beside `run_meta.json`; the same settings continue, different ones are refused.

    Each process appends to a file of its own. Whoever finds that nobody else is writing puts all rows into `ROWS`.

    Args:
        path: the folder, made by `opened`.
        settings: what decides the numbers (as JSON reads it back).
        key_of: tells rows apart.
        earlier: the folder may have these settings instead; whoever adds to it writes the new ones.
        part: names the file of this process; empty for `ROWS`.

    Attributes:
        meta: what `run_meta.json` holds.
        rows: all that are known of, by key.
        notes: what was odd, a sentence each.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        key_of: KeyOf,
        earlier: dict[str, Any] | None = None,
        part: str = "",
    ) -> None:
        self.path, self._earlier = path, earlier
        self.rows_path = path / (PARTS.replace("*", part) if part else ROWS)
        self._settings, self._key_of = settings, key_of
        self._file = RowFile(self.rows_path)
        self._counted: dict[Path, tuple[int, int]] = {}
        self.meta: dict[str, Any] = {}
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.notes: list[str] = []

    def check(self) -> None:
        """Read the settings that are there.

        Raises:
            UserError: they are damaged, or others.
        """
        before = read_meta(self.path)
        if before is not None:
            if differences(before["settings"], self._settings):
                refuse_other_settings(
                    before["settings"],
                    self._earlier or self._settings,
                    f"{self.path} holds results of other settings",
                    f"choose another --output, or repeat those settings with --config {self.path / 'run.yaml'}",
                )
        elif self.rows_path.exists():
            raise UserError(f"{self.rows_path} has no {META} beside it, so its settings are unknown; {_ELSEWHERE}")
        self.meta = before or {"settings": self._settings}

    @contextmanager
    def opened(self, again: bool = False) -> Iterator[ResultFolder]:
        """Hold this process's file of rows, and read what is there.

        Args:
            again: forget what is there.

        Raises:
            UserError: another process holds it, or the folder cannot be used.
        """
        if not again:
            self.check()
        make_folder(self.path)
        with lock.held(self.rows_path):
            for name in (ROWS, META, SUMMARY) if again else ():
                (self.path / name).unlink(missing_ok=True)
            with self.alone():
                self.write_meta({})
                self.tidy()
            try:
                yield self
            finally:
                self._file.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes to what all processes share meanwhile; what others wrote there is read anew."""
        with lock.held(self.path / META, lock.PATIENTLY):
            self.check()
            yield

    @property
    def has_others(self) -> bool:
        """Whether another process is writing rows, too."""
        return lock.held_elsewhere(self.rows_path)

    def tidy(self) -> None:
        """Read all rows and, if nobody else is writing, put them into one file: without lines cut off or written twice.

        Call it from inside `alone`.
        """
        self._file.close()
        parts = sorted(self.path.glob(PARTS))
        lines, notes = read_lines([self.path / ROWS, *parts], self._key_of)
        if (notes or parts) and not self.has_others:
            write_whole(self.path / ROWS, b"".join(line for line, _ in lines.values()))
            for part in parts:  # a crash before this point reads them again, and counts every row once
                part.unlink(missing_ok=True)
        self.rows = {key: row for key, (_, row) in lines.items()}
        self.notes = list(dict.fromkeys([*self.notes, *notes]))

    def add(self, rows: Iterable[Row]) -> None:
        """Write finished rows, without those that are there."""
        new = {key: row for row in rows if (key := self._key_of(row)) not in self.rows}
        if new:
            self._file.append(new.values())
            self.rows |= new

    def lines_of_others(self) -> int:
        """Lines that other processes have written."""
        for path in {self.path / ROWS, *self.path.glob(PARTS)} - {self.rows_path}:
            offset, lines = self._counted.get(path, (0, 0))
            with suppress(OSError), path.open("rb") as file:
                file.seek(offset)
                content = file.read()
                self._counted[path] = (offset + len(content), lines + content.count(b"\n"))
        return sum(lines for _, lines in self._counted.values())

    def write_meta(self, changes: Mapping[str, Any]) -> None:
        """Merge into `run_meta.json`; where several processes may do so, from inside `alone`."""
        self.meta = {**self.meta, **changes}
        self.write_json(META, self.meta)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(self.path / name, text.encode("utf-8", errors="backslashreplace"))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, whole or not at all."""
        write_whole(self.path / name, text.encode("utf-8"))


_ELSEWHERE = "choose another --output, or move that folder away"


def make_folder(path: Path) -> None:
    """Make the folder of a run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; choose another --output") from error


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a file that cannot be written."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; every row before this one is kept: make room, and the same "
        "command continues"
    )


def read_meta(path: Path) -> dict[str, Any] | None:
    """The content of a folder's `run_meta.json`; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    file = path / META
    try:
        meta = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; {_ELSEWHERE}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); {_ELSEWHERE}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("settings"), dict):
        raise UserError(f"{file} is damaged (no settings in it); {_ELSEWHERE}")
    return meta


def read_rows(path: Path, key_of: KeyOf) -> tuple[list[Row], list[str]]:
    """The rows of a folder, also of one that is being written, and a sentence about everything odd in it.

    Nothing is changed on disk.

    Raises:
        UserError: a line is damaged.
    """
    lines, notes = read_lines([path / ROWS, *sorted(path.glob(PARTS))], key_of)
    return [row for _, row in lines.values()], notes


def read_lines(paths: Iterable[Path], key_of: KeyOf) -> tuple[dict[tuple[Any, ...], tuple[bytes, Row]], list[str]]:
    """Lines and rows by key, the first of equal keys, and a sentence about what was left out."""
    found: dict[tuple[Any, ...], tuple[bytes, Row]] = {}
    notes = []
    for path in paths:
        try:
            *whole, rest = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; {_ELSEWHERE}") from error
        twice = 0
        for number, line in enumerate(whole, 1):
            key, row = _parse(path, number, line, key_of)
            twice += key in found
            found.setdefault(key, (line + b"\n", row))
        if twice:
            notes.append(f"{path}: {twice} rows are there twice; the first of each counts")
        if rest:
            notes.append(f"{path}: the last line was cut off; its row is computed again")
    return found, notes


def _parse(path: Path, number: int, line: bytes, key_of: KeyOf) -> tuple[tuple[Any, ...], Row]:
    try:
        row = json.loads(line)
        key = key_of(row)
        hash(key)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}, line {number} is damaged ({reason}); delete this line to have its row computed again, "
            "or choose another --output"
        ) from error
    return key, row


def encode_row(row: Row) -> bytes:
    """One line of strict JSON; numbers that JSON does not have become null."""
    text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, from the data
        return json.dumps(finite(row), allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """The value with None for every number that is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], what: str, way_out: str) -> None:
    """Raise if settings are not the ones asked for, and show where they differ, line by line."""
    if found := differences(before, now):
        shown = "\n".join(found)
        raise UserError(f"{what}:\n{shown}\n{way_out}")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where settings are not the same, a line each."""
    # Options that are newer than the folder had their defaults.
    defaults = {**CacheOptions().as_json(), **TaskOptions().as_json(), "haystack": []}
    before = {**{name: value for name, value in defaults.items() if name in now}, **before}
    return [
        f"  {name}: {before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
