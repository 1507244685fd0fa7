"""Result folders read into runs, each under the shortest end of its path that no other has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pandas import DataFrame, MultiIndex, concat

from ..caches.budgets import FULL
from ..errors import UserError
from ..store.checks import row_key
from ..store.notes import notes_of
from ..store.results import ROWS, Row, read_folder
from ..tables.frame import long_frame
from ..tables.means import curves
from ..tables.table import Table

Variant = tuple[str, str]
"""A policy and a budget."""
#: What names a line of most tables.
LINE = ("run", "budget", "policy")


@dataclass(frozen=True, eq=False)
class Run:
    """The rows of a folder that have the settings of its last command.

    Attributes:
        label: empty if there is no other run.
        meta: what the last command wrote down; empty if nothing says.
        odd: sentences on what was odd in the folder.
        rows: over tasks; `texts` those over texts.
    """

    label: str
    folder: Path
    meta: dict[str, Any]
    odd: tuple[str, ...]
    rows: tuple[Row, ...]
    texts: tuple[Row, ...]

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks with rows, in the order of the settings."""
        return self._ordered([row["task"] for row in self.rows], "tasks")

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Policies and budgets with rows: the full cache, then by budget, both in the order of the settings."""
        pairs = dict.fromkeys((row["policy"], row["budget"]) for row in (*self.rows, *self.texts))
        budgets = self._ordered([budget for _, budget in pairs], "budgets")
        policies = self._ordered([policy for policy, _ in pairs], "policies")
        return tuple(sorted(pairs, key=lambda it: (it[0] != FULL, budgets.index(it[1]), policies.index(it[0]))))

    @cached_property
    def frame(self) -> DataFrame:
        """Rows over tasks as one long table, by task, length, budget and policy."""
        tasks, variants = ({name: at for at, name in enumerate(names)} for names in (self.tasks, self.variants))

        def place(row: Row) -> tuple[int, int, int]:
            return tasks[row["task"]], row["length"] or 0, variants[row["policy"], row["budget"]]

        return long_frame(sorted(self.rows, key=place), self.label)

    @cached_property
    def curves(self) -> DataFrame:
        """Perplexities of rows over texts."""
        return curves(self.texts)

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Tasks and lengths of their prompts, ascending; 0 stands for prompts of their own length."""
        return list(dict.fromkeys(zip(self.frame["task"], self.frame["length"], strict=True)))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of all tasks, ascending."""
        return sorted({length for _, length in self.places})

    @property
    def notes(self) -> list[str]:
        """Sentences on what is odd, and on what the last command asked for and is not there."""
        wanted, there = self.meta.get("rows", {}).get("wanted", 0), len(self.rows) + len(self.texts)
        lacking = [f"{there} of {wanted} rows are there; the command of the run continues it"] if there < wanted else []
        failed = [f"{one['rows']} rows failed: {one['reason']}" for one in self.meta.get("failures", [])]
        notes = [*lacking, *failed, *self.meta.get("data_notes", {}).values(), *notes_of(self.rows), *self.odd]
        return [f"{self.label}: {note}" if self.label else note for note in notes]

    def _ordered(self, names: Sequence[str], setting: str) -> tuple[str, ...]:
        present = dict.fromkeys(names)
        order = map(str, self.meta.get("settings", {}).get(setting) or ())
        return tuple(dict.fromkeys([*(name for name in order if name in present), *present]))


def frame_of(runs: Sequence[Run]) -> DataFrame:
    """The rows of all runs below each other, under the labels of their runs."""
    return runs[0].frame if len(runs) == 1 else concat([run.frame for run in runs], ignore_index=True)


def lines_of(runs: Sequence[Run]) -> MultiIndex:
    """Run, budget and policy of every line of a table."""
    lines = [(run.label, budget, policy) for run in runs for policy, budget in run.variants]
    return MultiIndex.from_tuples(lines, names=LINE)


def line_table(
    name: str,
    title: str,
    frame: DataFrame,
    lines: MultiIndex,
    *,
    digits: int | Mapping[str, int] = 2,
    note: str = "",
    best: Collection[str] = (),
    lowest: bool = False,
) -> Table | None:
    """A table of a line per run, budget and policy, as far as it has a number; None if none has."""
    frame = frame.reindex(lines).dropna(how="all")
    if frame.empty:
        return None
    shown = frame.droplevel("run") if lines.levels[0].tolist() == [""] else frame
    return Table(name, title, shown, digits, note, best, lowest)


def prompts_of(runs: Sequence[Run], length: int) -> str:
    """How long prompts are in tokens, as counted; what was asked for where the rows do not say."""
    frame = frame_of(runs)
    tokens = frame["prompt_tokens"][frame["length"] == length].dropna()
    if tokens.empty:
        return f"prompts of {length} tokens" if length else "prompts of their own length"
    least, most = int(tokens.min()), int(tokens.max())
    span = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    asked = f" (asked for {length:,})" if length and (least, most) != (length, length) else ""
    return f"prompts of {span} tokens{asked}"


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
    loaded, reasons = {}, []
    for folder in unique:
        try:
            loaded[folder] = _read(folder)
        except NothingToReportError as error:
            reasons.append(str(error))
    if not loaded:
        raise UserError("\n".join(reasons))
    if skipped is not None:
        skipped += [f"left out: {reason}" for reason in reasons]
    labels = ends([*loaded]) if len(loaded) > 1 else [""]
    return [Run(label, folder, *facts) for label, (folder, facts) in zip(labels, loaded.items(), strict=True)]


def _read(folder: Path) -> tuple[dict[str, Any], tuple[str, ...], tuple[Row, ...], tuple[Row, ...]]:
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
    if not meta:
        odd.append(f"nothing says what was run in {folder}: its settings are unknown")
    of_tasks, of_texts = (tuple(row for row in rows.values() if ("text" in row) == text) for text in (False, True))
    return meta, tuple(odd), of_tasks, of_texts


def ends(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of these paths, all different, that differ from each other."""
    parts = [path.resolve().parts for path in paths]
    depth = next(n for n in range(1, 99) if len({path[-n:] for path in parts}) == len(parts))
    return ["/".join(path[-depth:]) for path in parts]
