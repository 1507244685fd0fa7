"""Result folders read into runs, each under a label that says how it differs from the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pandas import DataFrame, MultiIndex, concat

from ..caches.budgets import FULL
from ..errors import UserError
from ..grouping import grouped
from ..store.checks import row_key
from ..store.prompt_file import read_prompts
from ..store.results import ROWS, Row, read_folder
from ..tables.frame import long_frame
from ..tables.means import curves
from ..tables.table import Table
from .labels import labels

#: What rows tell by themselves: runs that differ in nothing else complete one another.
COVERAGE = frozenset({"tasks", "lengths", "policies", "budgets", "limit", "samples", "files", "agreement"})
Rows = dict[tuple[Any, ...], Row]
"""By what tells them apart."""
Variant = tuple[str, str]
"""A policy and a budget."""
#: What names a line of most tables, and what counts the same within one.
LINE, PLACE = ("run", "budget", "policy"), ("task", "length")


@dataclass(frozen=True)
class Source:
    """One result folder: what its last command was (empty if nothing says) and what was odd in it."""

    folder: Path
    meta: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.meta.get("settings", {}))

    def named(self, setting: str) -> list[str]:
        """The names in a setting that is a list."""
        return list(map(str, self.settings.get(setting) or ()))


@dataclass(frozen=True, eq=False)
class Run:
    """Rows under the same settings, of one folder or of several that complete one another.

    Attributes:
        label: how it differs from the other runs; empty if there is no other.
        rows: over tasks; `texts` those over texts.
    """

    label: str
    sources: tuple[Source, ...]
    rows: tuple[Row, ...]
    texts: tuple[Row, ...]

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks with rows, in the order of the settings."""
        return _ordered([row["task"] for row in self.rows], self._named("tasks"))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Policies and budgets with rows: the full cache, then by budget, both in the order of the settings."""
        pairs = dict.fromkeys((row["policy"], row["budget"]) for row in (*self.rows, *self.texts))
        budgets = _ordered([budget for _, budget in pairs], self._named("budgets"))
        policies = _ordered([policy for policy, _ in pairs], self._named("policies"))
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
    def prompts(self) -> dict[tuple[str, int | None, str], str]:
        """The whole prompt of each question by task, length and id, as far as they were logged."""
        return {key: text for source in self.sources for key, text in read_prompts(source.folder).items()}

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Tasks and lengths of their prompts, ascending; 0 stands for prompts of their own length."""
        return list(dict.fromkeys(zip(self.frame["task"], self.frame["length"], strict=True)))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of all tasks, ascending."""
        return sorted({length for _, length in self.places})

    def _named(self, setting: str) -> list[str]:
        return [name for source in self.sources for name in source.named(setting)]


def frame_of(runs: Sequence[Run]) -> DataFrame:
    """The rows of all runs below each other, under the labels of their runs."""
    return runs[0].frame if len(runs) == 1 else concat([run.frame for run in runs], ignore_index=True)


def lines_of(runs: Sequence[Run]) -> MultiIndex:
    """Run, budget and policy of every line of a table."""
    lines = [(run.label, budget, policy) for run in runs for policy, budget in run.variants]
    return MultiIndex.from_tuples(lines, names=LINE)


def complete(frame: DataFrame, of: Sequence[str], by: str = "run", among: DataFrame | None = None) -> DataFrame:
    """Rows of the policies and budgets that have some for all values of `of`, within each group of `by`.

    Args:
        among: the rows that have all values, if these do not.
    """
    has = frame.drop_duplicates([by, "policy", "budget", *of]).groupby([by, "policy", "budget"]).size()
    wanted = (frame if among is None else among).drop_duplicates([by, *of]).groupby(by).size()
    whole = has.rename("has").reset_index().set_index(by).join(wanted.rename("wanted")).query("has == wanted")
    lines = MultiIndex.from_frame(whole.reset_index()[[by, "policy", "budget"]])
    return frame[MultiIndex.from_frame(frame[[by, "policy", "budget"]]).isin(lines)]


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
    return (
        f"prompts of {span} tokens{f' (asked for {length:,})' if length and (least, most) != (length, length) else ''}"
    )


def _ordered(names: Sequence[str], order: Sequence[str]) -> tuple[str, ...]:
    present = dict.fromkeys(names)
    return tuple(dict.fromkeys([*(name for name in order if name in present), *present]))


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
    loaded, reasons = [], []
    for folder in unique:
        try:
            loaded.append(_load(folder))
        except NothingToReportError as error:
            reasons.append(str(error))
    if not loaded:
        raise UserError("\n".join(reasons))
    if skipped is not None:
        skipped += [f"left out: {reason}" for reason in reasons]
    names = labels(_told_apart([source for source, _ in loaded]), COVERAGE)
    return _unite([(label, source, rows) for label, (source, rows) in zip(names, loaded, strict=True)])


def _told_apart(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The settings of each; with the digest of the weights where one model has several."""
    weights = {(source.settings.get("model"), source.meta.get("weights")) for source in sources}
    if len(weights) == len({model for model, _ in weights}):
        return [source.settings for source in sources]
    return [source.settings | {"weights": source.meta.get("weights")} for source in sources]


def _load(folder: Path) -> tuple[Source, Rows]:
    if folder.is_file():
        raise NothingToReportError(f"{folder} is a file: give the folder that `paged-eviction eval --output` wrote to")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that `paged-eviction eval --output` wrote to")
    rows, meta, notes = read_folder(folder, row_key)
    if not rows:
        inside = sorted({path.parent for path in folder.glob(f"*/{ROWS}")})
        hint = f"; give the folders inside it: {' '.join(map(str, inside))}" if inside else ""
        raise NothingToReportError(
            f"no finished row in {folder} ({ROWS} is absent or empty){hint or '; run `paged-eviction eval` first'}"
        )
    if not meta:
        notes.append(f"nothing says what was run in {folder}: its settings are unknown")
    return Source(folder, meta, tuple(notes)), rows


def _unite(sources: Sequence[tuple[str, Source, Rows]]) -> list[Run]:
    """Folders of one label are one run, unless they have rows in common: then their names tell them apart."""
    runs = []
    for label, all_of in grouped(sources, lambda source: source[0]).items():
        members = [(source, rows) for _, source, rows in all_of]
        keys = [key for _, rows in members for key in rows]
        unknown = any(not source.meta for source, _ in members)
        if len(members) == 1 or (len(set(keys)) == len(keys) and not unknown):
            runs.append(_run(label, members))
            continue
        names = _names([source.folder for source, _ in members])
        for name, member in zip(names, members, strict=True):
            runs.append(_run(", ".join(filter(None, [label, name])), [member]))
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of these paths that differ from each other."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next((n for n in range(1, 99) if len({path[-n:] for path in parts}) == len(parts)), 99)
    return ["/".join(path[-depth:]) for path in parts]


def _run(label: str, members: Sequence[tuple[Source, Rows]]) -> Run:
    rows = [row for _, some in members for row in some.values()]
    return Run(
        label,
        tuple(source for source, _ in members),
        tuple(row for row in rows if "text" not in row),
        tuple(row for row in rows if "text" in row),
    )
