"""A folder of results may grow: more policies, budgets, tasks, lengths or samples, and the rows that are there stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ..data.prompting.suites import GENERATED_SAMPLES, is_generated
from ..options.settings import Settings, TaskSettings, TextSettings
from .results import read_meta

S = TypeVar("S", bound=Settings)

#: Settings that are lists; what is in either list runs.
LISTS = ("policies", "budgets", "tasks", "lengths", "task_file")


def grown(settings: S, output: Path) -> tuple[S, S | None]:
    """The settings with all that the folder has already, and those that it had; None if they are the same.

    A folder holds a grid: new policies run at the old budgets too. What changes the meaning of rows stays as it was
    asked for, so that the folder refuses it.
    """
    meta = read_meta(output)
    if meta is None:
        return settings, None
    before = meta["settings"]
    old: dict[str, Any] = {name: tuple(before[name]) for name in LISTS if _is_list(settings, before, name)}
    changes: dict[str, Any] = {
        name: tuple(dict.fromkeys([*values, *getattr(settings, name)])) for name, values in old.items()
    }
    both = {before.get("attn_implementation"), settings.attn_implementation}
    if both == {None, PAGED_EVICTION}:  # which computes as sdpa does, and only shows the queries
        old["attn_implementation"] = before.get("attn_implementation")
        changes["attn_implementation"] = PAGED_EVICTION
    if isinstance(settings, TextSettings):
        old["positions"] = before.get("positions", "text")
        changes["positions"] = ",".join(dict.fromkeys(f"{old['positions']},{settings.positions}".split(",")))
    if "limit" in before and before["limit"] != settings.limit:
        old["limit"] = before["limit"]
        changes["limit"] = _larger(settings.but(**changes), before["limit"])
    earlier, settings = settings.but(**old), settings.but(**changes)
    return settings, None if earlier == settings else earlier


def _is_list(settings: Settings, before: dict[str, Any], name: str) -> bool:
    return isinstance(getattr(settings, name, None), tuple) and isinstance(before.get(name), list)


def _larger(settings: Settings, before: int | None) -> int | None:
    """The limit that leaves out nothing; that of the settings where none does for all tasks."""
    now = settings.limit
    if before is not None and now is not None:
        return max(before, now)
    if not isinstance(settings, TaskSettings):
        return now
    generated = {is_generated(task) for task in settings.tasks}
    if generated == {True}:
        return max(GENERATED_SAMPLES if limit is None else limit for limit in (before, now))
    return None if generated == {False} else now


def beyond(asked: Settings, now: Settings) -> str:
    """What runs besides what was asked for, since the folder has it, in one line; empty if nothing does."""
    listed = ", ".join(each for name in LISTS for each in _added(asked, now, name))
    if not listed:
        return ""
    return f"this folder has {listed}, too, and what is missing of that runs as well; another --output runs alone"


def describe(earlier: Settings, now: Settings) -> str:
    """What is new, in one line."""
    parts = []
    for name in (*LISTS, "positions", "limit", "attn_implementation"):
        old: Any = getattr(earlier, name, None)
        new: Any = getattr(now, name, None)
        if old != new:
            more = _added(earlier, now, name) if isinstance(new, tuple) else [f"{old} to {new}"]
            parts += [f"{name} {', '.join(more)}"] if more else []
    return f"this folder grows: {'; '.join(parts)}"


def _added(before: Settings, now: Settings, name: str) -> list[str]:
    """What a list of the settings has now and had not before; nothing where they have no such list."""
    old: Any = getattr(before, name, ())
    return [str(each) for each in getattr(now, name, ()) if each not in old]
