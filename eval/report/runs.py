"""Result folders read into runs, each under a label that says how it differs from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..caches.budgets import FULL
from ..errors import UserError
from ..store.checks import row_key
from ..store.grouping import grouped
from ..store.results import ROWS, Row, finite, read_folder
from .labels import labels

#: What rows tell by themselves: runs that differ in nothing else complete one another.
COVERAGE = frozenset({"tasks", "lengths", "policies", "budgets", "limit", "samples", "files", "agreement"})
Variant = tuple[str, str]
"""A policy and a budget."""


@dataclass(frozen=True)
class Source:
    """One result folder: what its last command was (empty if nothing says) and what was odd in it."""

    folder: Path
    meta: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        found = self.meta.get("settings", {})
        return dict(found) if isinstance(found, dict) else {}

    def named(self, setting: str) -> list[str]:
        """The names in a setting that is a list."""
        found = self.settings.get(setting)
        return [str(name) for name in found] if isinstance(found, list) else []


@dataclass(frozen=True)
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
        found = dict.fromkeys((row["policy"], row["budget"]) for row in (*self.rows, *self.texts))
        budgets = _ordered([budget for _, budget in found], self._named("budgets"))
        policies = _ordered([policy for policy, _ in found], self._named("policies"))
        return tuple(sorted(found, key=lambda it: (it[0] != FULL, budgets.index(it[1]), policies.index(it[0]))))

    def of(self, task: str, length: int | None, variant: Variant) -> list[Row]:
        """The rows of one task, length, policy and budget."""
        return self._groups.get((task, length, *variant), [])

    def answers(self, variant: Variant, lengths: Sequence[int | None] | None = None) -> list[Row]:
        """The rows of one policy and budget, over all tasks; of some lengths, or of all if None."""
        return [
            row
            for (_, length, *own), rows in self._groups.items()
            if tuple(own) == variant and (lengths is None or length in lengths)
            for row in rows
        ]

    @cached_property
    def all_lengths(self) -> list[int | None]:
        """Lengths of all tasks, ascending; None stands for prompts of their own length."""
        return sorted({row["length"] for row in self.rows}, key=lambda length: length or 0)

    def lengths(self, task: str) -> list[int | None]:
        """Lengths of a task in ascending order; only None if its prompts have their own."""
        return self._lengths.get(task, [])

    @cached_property
    def prompt_tokens(self) -> dict[int | None, tuple[int, ...]]:
        """Tokens of every prompt, by the length that was asked for; where the rows say."""
        found: dict[int | None, dict[tuple[str, str], int]] = {}
        for row in self.rows:
            if row.get("prompt_tokens") is not None:
                found.setdefault(row["length"], {})[row["task"], row["id"]] = row["prompt_tokens"]
        return {length: tuple(tokens.values()) for length, tokens in found.items()}

    @cached_property
    def _groups(self) -> dict[tuple[Any, ...], list[Row]]:
        return grouped(self.rows, lambda row: (row["task"], row["length"], row["policy"], row["budget"]))

    @cached_property
    def _lengths(self) -> dict[str, list[int | None]]:
        by_task = grouped(self._groups, lambda key: key[0])
        return {task: sorted({key[1] for key in keys}, key=lambda it: it or 0) for task, keys in by_task.items()}

    def _named(self, setting: str) -> list[str]:
        return [name for source in self.sources for name in source.named(setting)]


def prompts_of(runs: Sequence[Run], length: int | None) -> str:
    """How long prompts are in tokens, as counted; what was asked for where the rows do not say."""
    tokens = [count for run in runs for count in run.prompt_tokens.get(length, ())]
    if not tokens:
        return "prompts of their own length" if length is None else f"prompts of {length} tokens"
    least, most = min(tokens), max(tokens)
    found = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    asked = f" (asked for {length:,})" if length is not None and (least, most) != (length, length) else ""
    return f"prompts of {found} tokens{asked}"


def _ordered(found: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    present = dict.fromkeys(found)
    return tuple(dict.fromkeys([*(name for name in known if name in present), *present]))


class NothingToReportError(UserError):
    """A folder without answers."""


def load_runs(folders: Sequence[Path], skipped: list[str] | None = None) -> list[Run]:
    """Read result folders.

    Args:
        skipped: gets a line for each folder without answers, as `results/*` brings some; without it they are refused.

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
            if skipped is None or len(unique) == 1:
                raise
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


def _load(folder: Path) -> tuple[Source, list[Row]]:
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
    return Source(folder, finite(meta), tuple(notes)), [finite(row) for row in rows]


def _unite(found: Sequence[tuple[str, Source, list[Row]]]) -> list[Run]:
    """Folders of one label are one run, unless they have rows in common: then their names tell them apart."""
    runs = []
    for label, all_of in grouped(found, lambda each: each[0]).items():
        members = [(source, rows) for _, source, rows in all_of]
        keys = [row_key(row) for _, rows in members for row in rows]
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


def _run(label: str, members: Sequence[tuple[Source, list[Row]]]) -> Run:
    rows = [row for _, some in members for row in some]
    return Run(
        label,
        tuple(source for source, _ in members),
        tuple(row for row in rows if "text" not in row),
        tuple(row for row in rows if "text" in row),
    )
