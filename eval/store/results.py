"""A folder of results: every row says by which settings it was made, and every process appends to a file of its own.

Whatever ends a run (a killed process, a full disk), the rows that were written count: a command computes those of its
rows that are not in the folder. So several commands, shards, and a command after a crash all work the same way,
without locks.

    rows.<id>.jsonl         rows of one process; the ids of later processes are larger
    run.<id>.json           what that process was asked, where it ran, what went wrong
    settings/<digest>.json  what decides the rows that carry this digest; written once
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import getnode, uuid4

import psutil

from ..errors import UserError

Row = dict[str, Any]
#: What tells the rows of one command apart; raises KeyError, TypeError or ValueError for what is no row.
KeyOf = Callable[[Row], tuple[Any, ...]]

ROWS, RUNS, SUMMARY = "rows.*.jsonl", "run.*.json", "summary.json"
#: Seconds between two moments at which rows are forced to the disk: what a power cut may cost.
SYNC_SECONDS = 1.0
_ELSEWHERE = "choose another --output, or move that folder away"


def settings_differences(folder: ResultFolder) -> list[str]:
    """A sentence for each of the other settings that rows of a folder have, with where they differ."""
    notes = []
    for digest, rows in folder.others.items():
        where = ""
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            before = json.loads((folder.path / "settings" / f"{digest}.json").read_bytes())
            where = ", ".join(differences(before, folder.meanings[""]))
        note = f"{rows} rows here are of other settings and stay where they are"
        notes.append(f"{note} ({where})" if where else note)
    return notes


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where settings are not the same."""
    return [
        f"{name}: {before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


class ResultFolder:
    """The rows of a folder that a command asks for, and the file to which it adds its own.

    Args:
        path: the folder; it is made.
        meanings: what decides a row, by the policy that the row names; "" for all others.
        key_of: tells the rows of one command apart.
        prompt_of: the digest of the prompt that a key asks about now, None for a key that is not asked; None where
            rows have no prompts.

    Attributes:
        digests: of `meanings`.
        rows: those that are there, by key.
        others: digests of other settings in this folder, and how many rows have them.
        meta: facts of this process, or those of the last one that had the same settings.

    Raises:
        UserError: the folder cannot be used, or a row is damaged.
    """

    def __init__(
        self,
        path: Path,
        meanings: Mapping[str, Mapping[str, Any]],
        key_of: KeyOf,
        prompt_of: Callable[[tuple[Any, ...]], str | None] | None = None,
    ) -> None:
        self.path, self.meanings, self._key_of = path, meanings, key_of
        self._prompt_of = prompt_of
        self.digests = {policy: settings_digest(meaning) for policy, meaning in meanings.items()}
        self.id = f"{time.time_ns():016x}-{uuid4().hex[:8]}"
        self._file, self._synced = path / ROWS.replace("*", self.id), 0.0
        self._counted: dict[Path, tuple[int, int]] = {}
        make_folder(path / "settings")
        delete_halves(path)
        for policy, meaning in meanings.items():
            write_json(path / "settings" / f"{self.digests[policy]}.json", meaning)
        self.read()
        runs = [run for run in read_runs(path)[0] if run.get("digests", {}).get("") == self.digests[""]]
        self.meta: dict[str, Any] = {**(runs[-1] if runs else {}), "digests": self.digests}

    def read(self) -> None:
        """Read the rows that are there now, of this process and of others."""
        rows: dict[tuple[Any, ...], Row] = {}
        others = Counter[str]()
        for path, number, row in read_rows(self.path):
            if self._digest(row) != row.get("settings"):
                others[str(row.get("settings"))] += 1
                continue
            with damaged(path, number):
                key = self._key_of(row)
                if self._prompt_of is None or self._prompt_of(key) == row["prompt"]:
                    rows.setdefault(key, row)
        self.rows, self.others = rows, others

    def _digest(self, row: Row) -> str:
        return self.digests.get(str(row.get("policy")), self.digests[""])

    def add(self, rows: Iterable[Row]) -> None:
        """Write finished rows, without those that are there.

        Raises:
            UserError: they cannot be written; none of them is left in the file.
        """
        new = {}
        for row in rows:
            key = self._key_of(row)
            if key not in self.rows:
                prompt = {} if self._prompt_of is None else {"prompt": self._prompt_of(key)}
                new[key] = {**row, "settings": self._digest(row), **prompt}
        if new:
            self._append(b"".join(map(encode_row, new.values())))
            self.rows |= new

    def _append(self, content: bytes) -> None:
        """Hand lines to the operating system at once: whole or, if the process dies in the middle, cut off."""
        try:
            with self._file.open("ab", buffering=0) as file:
                before = file.tell()
                try:
                    while content:  # a disk that fills takes a part first, and refuses the rest
                        content = content[file.write(content) :]
                    if time.monotonic() - self._synced > SYNC_SECONDS:
                        os.fsync(file.fileno())
                        self._synced = time.monotonic()
                except OSError:
                    with suppress(OSError):
                        file.truncate(before)
                    raise
        except OSError as error:
            raise cannot_write(self._file, error) from error

    def lines_of_others(self) -> int:
        """Lines that other processes have written."""
        for path in {*self.path.glob(ROWS)} - {self._file}:
            offset, lines = self._counted.get(path, (0, 0))
            with suppress(OSError), path.open("rb") as file:
                file.seek(offset)
                content = file.read()
                self._counted[path] = (offset + len(content), lines + content.count(b"\n"))
        return sum(lines for _, lines in self._counted.values())

    def write_meta(self, changes: Mapping[str, Any]) -> None:
        """Note facts of this process."""
        self.meta = {**self.meta, **changes}
        write_json(self.path / RUNS.replace("*", self.id), self.meta)


def settings_digest(meaning: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of what decides a row, the same whatever the order."""
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


def read_folder(path: Path, key_of: KeyOf) -> tuple[dict[tuple[Any, ...], Row], dict[str, Any], list[str]]:
    """The rows of a folder that have the settings of the last command in it, and what was asked for.

    Policies, budgets, tasks and numbers of samples are no such settings: rows of commands that differ only in these
    are read together. If the files behind a policy changed, its newest rows count. Nothing is changed on disk.

    Returns:
        Rows by their keys, the facts of the last command, and a sentence about everything odd.

    Raises:
        UserError: a row is damaged.
    """
    runs, notes = read_runs(path)
    is_asked = of_last(runs)
    rows: dict[tuple[Any, ...], Row] = {}
    left_out = 0
    for file, number, row in read_rows(path):
        with damaged(file, number):
            key = key_of(row)
        if is_asked(row):
            rows[key] = row  # the newest, where prompts of one name differ
        else:
            left_out += 1
    if left_out:
        notes.append(
            f"{path}: {left_out} rows are of other settings than those of the last command there, and are left out"
        )
    return rows, runs[-1] if runs else {}, notes


def of_last(runs: Sequence[dict[str, Any]]) -> Callable[[Row], bool]:
    """Whether a row has the settings of the last command; all have where nothing says what these are."""
    same = [run["digests"] for run in runs if run["digests"][""] == runs[-1]["digests"][""]]
    digests = {policy: digest for one in same for policy, digest in one.items()}
    return lambda row: not runs or row.get("settings") == digests.get(str(row.get("policy")), digests[""])


def read_runs(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What was asked in this folder, the last time at the end, and a sentence about each file that cannot be read."""
    runs, notes = [], []
    for file in sorted(path.glob(RUNS)):
        try:
            run = _read_json(file.read_bytes())
            if not isinstance(run, dict) or not isinstance(run["digests"], dict) or "" not in run["digests"]:
                raise ValueError("it has no digests of settings")
        except (OSError, ValueError, KeyError, RecursionError, TypeError) as error:
            notes.append(f"{file} is damaged ({error}) and left out; the same command writes another")
        else:
            runs.append(run)
    return runs, notes


def _read_json(content: bytes) -> Any:
    """What a file says; numbers that JSON does not have, which others may have written, are null."""
    return json.loads(content, parse_constant=lambda _: None)


def read_rows(path: Path) -> Iterator[tuple[Path, int, Row]]:
    """File, number and row of every whole line; half a line at the end is that of a process that died.

    Raises:
        UserError: a file cannot be read, or a line is damaged.
    """
    for file in sorted(path.glob(ROWS)):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; {_ELSEWHERE}") from error
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            with damaged(file, number):
                row = _read_json(line)
                if not isinstance(row, dict):
                    raise TypeError("it is no object")
            yield file, number, row


@contextmanager
def damaged(path: Path, number: int) -> Iterator[None]:
    """Whatever a row lacks is said with its place."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}, line {number} is damaged ({reason}); delete this line to have its row computed again, "
            "or choose another --output"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}; choose another --output") from error


def delete_halves(path: Path) -> None:
    """Delete the files of results in a folder that killed processes of this machine were writing."""
    name = f".*.{getnode():x}-*.partial"
    for half in (*path.glob(name), *path.glob(f"settings/{name}")):
        if not psutil.pid_exists(int(half.name.split("-")[-1].split(".")[0])):
            with suppress(OSError):
                half.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a file that cannot be written."""
    return UserError(
        f"cannot write {path}: {error.strerror or error}; every row before this one is kept: free some space and "
        "run the same command again to continue"
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, even if this process is killed; a file that has this content stays as it is.

    Raises:
        UserError: it cannot be written.
    """
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    partial = path.with_name(f".{path.name}.{uuid4().hex}.{getnode():x}-{os.getpid()}.partial")
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


def write_json(path: Path, content: Any) -> None:
    """Write strict JSON, whole or not at all."""
    text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))


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
