"""Result folders read into runs, each under the shortest end of its path that no other has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from ..errors import UserError
from ..store.checks import row_key
from ..store.notes import notes_of
from ..store.results import ROWS, Row, read_folder
from .frame import long_frame, text_frame


@dataclass(frozen=True, eq=False)
class Run:
    """The rows of a folder that have the settings of its last command.

    Attributes:
        label: empty if there is no other run.
        meta: what the last command wrote down; empty if nothing says.
        notes: sentences on what is odd, and on what the last command asked for and is not there.
        frame: rows over tasks; `texts` those over texts.
    """

    label: str
    folder: Path
    meta: dict[str, Any]
    notes: list[str]
    frame: DataFrame
    texts: DataFrame


class NothingToReportError(UserError):
    """A folder without answers."""


def load_runs(folders: Sequence[Path], skipped: list[str] | None = None) -> list[Run]:
    """Read result folders.

    Args:
        skipped: gets a line for each folder without answers, as `results/*` brings some.

    Raises:
        UserError: a folder is absent or damaged, or none has answers.
    """
    if not folders:
        raise UserError("no folder of results given: paged-eviction report results/eval")
    unique = list({folder.resolve(): folder for folder in folders}.values())
    read, reasons = {}, []
    for folder in unique:
        try:
            read[folder] = _read(folder)
        except NothingToReportError as error:
            reasons.append(str(error))
    if not read:
        raise UserError("\n".join(reasons))
    if skipped is not None:
        skipped += [f"left out: {reason}" for reason in reasons]
    labels = ends([*read]) if len(read) > 1 else [""]
    return [_run(label, folder, *content) for label, (folder, content) in zip(labels, read.items(), strict=True)]


def _read(folder: Path) -> tuple[list[Row], dict[str, Any], list[str]]:
    if folder.is_file():
        raise NothingToReportError(f"{folder} is a file: give the folder that `paged-eviction eval --output` wrote to")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that `paged-eviction eval --output` wrote to")
    rows, meta, odd = read_folder(folder, row_key)
    if not rows:
        inside = sorted({path.parent for path in folder.glob(f"*/{ROWS}")})
        hint = f"; give the folders inside it: {' '.join(map(str, inside))}" if inside else ""
        raise NothingToReportError(
            f"no finished row in {folder} ({ROWS} is absent or empty){hint or '; run `paged-eviction eval` first'}"
        )
    return [*rows.values()], meta, odd


def _run(label: str, folder: Path, rows: Sequence[Row], meta: dict[str, Any], odd: Sequence[str]) -> Run:
    of_tasks, of_texts = ([row for row in rows if ("text" in row) == texts] for texts in (False, True))
    wanted, settings = meta.get("rows", {}).get("wanted", 0), meta.get("settings")
    notes = [
        *(
            [f"{len(rows)} of {wanted} rows are there; the command of the run continues it"]
            if len(rows) < wanted
            else []
        ),
        *(f"{one['rows']} rows failed: {one['reason']}" for one in meta.get("failures", [])),
        *meta.get("data_notes", {}).values(),
        *notes_of(of_tasks),
        *odd,
        *([] if meta else [f"nothing says what was run in {folder}: its settings are unknown"]),
    ]
    frames = long_frame(of_tasks, label, settings), text_frame(of_texts, label, settings)
    return Run(label, folder, meta, [f"{label}: {note}" if label else note for note in notes], *frames)


def ends(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of these paths, all different, that differ from each other."""
    parts = [path.resolve().parts for path in paths]
    depth = next(n for n in range(1, 99) if len({path[-n:] for path in parts}) == len(parts))
    return ["/".join(path[-depth:]) for path in parts]
