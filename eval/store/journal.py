"""A folder of results that one process works in: held, put in order, and closed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import lock
from .results import META, ROWS, SUMMARY, KeyOf, ResultFolder, Row


@dataclass(frozen=True)
class Journal:
    """Rows by key, those of earlier calls among them.

    Attributes:
        folder: where they are written.
        rows: all that are there.
        notes: what was put right.
    """

    folder: ResultFolder
    rows: dict[Any, Row]
    notes: list[str]
    _key_of: KeyOf

    def add(self, rows: Sequence[Row]) -> None:
        """Write finished rows, without those that are there."""
        new = {key: row for row in rows if (key := self._key_of(row)) not in self.rows}
        self.folder.append(new.values())
        self.rows.update(new)


@contextmanager
def journal(path: Path, settings: dict[str, Any], key_of: KeyOf, again: bool = False) -> Iterator[Journal]:
    """The journal in a folder, which no other process may write to meanwhile.

    Args:
        settings: what decides the numbers; a folder of others is refused.
        again: forget what is there.

    Raises:
        UserError: the folder cannot be used.
    """
    if again and path.is_dir():
        with lock.held(path / ROWS):
            for name in (ROWS, META, SUMMARY):
                (path / name).unlink(missing_ok=True)
    folder = ResultFolder(path, settings)
    with folder.held():
        rows, notes = folder.begin(key_of)
        yield Journal(folder, rows, notes, key_of)
