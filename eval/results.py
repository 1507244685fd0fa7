"""A folder of results: rows appended as they are finished, and the settings they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UserError

Row = dict[str, Any]


class ResultFolder:
    """Rows in a JSON-lines file beside `run_meta.json`; the same settings continue, different ones are refused.

    Nothing is written before there is a first row.

    Args:
        path: the folder, made when it is needed.
        settings: what decides the numbers (as JSON reads it back).
        rows_name: the file of rows.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rows_name: str = "results.jsonl") -> None:
        self.path = path
        self.rows_path = path / rows_name
        self.meta_path = path / "run_meta.json"
        before = self._read_meta()
        if before:
            refuse_other_settings(before["settings"], settings, path)
        elif self.rows_path.exists():
            raise UserError(f"{self.rows_path} has no run_meta.json beside it; choose another --output")
        self.meta: dict[str, Any] = before or {"settings": settings}

    def _read_meta(self) -> dict[str, Any]:
        if not self.meta_path.exists():
            return {}
        try:
            meta: dict[str, Any] = json.loads(self.meta_path.read_text("utf-8"))
        except ValueError as error:
            raise UserError(f"{self.meta_path} is damaged ({error}); choose another --output") from error
        return meta

    def write_meta(self, changes: dict[str, Any]) -> None:
        """Merge into `run_meta.json`."""
        self.meta |= changes
        self.write_json(self.meta_path.name, self.meta)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}; choose another --output") from error
        partial = self.path / f"{name}.partial"
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
        os.replace(partial, self.path / name)

    def rows(self) -> list[Row]:
        """All finished rows. A last line that was cut off is removed from the file."""
        if not self.rows_path.exists():
            return []
        content = self.rows_path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.rows_path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise UserError(f"{self.rows_path} is damaged ({error}); choose another --output") from error

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows and hand them to the operating system at once."""
        if not self.meta_path.exists():
            self.write_meta({})
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        with self.rows_path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise if a folder's settings are not the ones asked for, and show where they differ."""
    differences = [
        f"{name}: {before.get(name)!r} there, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise UserError(f"{path} holds results of other settings ({'; '.join(differences)}); choose another --output")
