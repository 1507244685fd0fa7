"""What a folder's earlier commands asked, for `--fill`: a grid of all policies, budgets, tasks and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..options.settings import Settings, TaskSettings, TextSettings
from ..store.results import read_runs
from ..tasks.suites import GENERATED_SAMPLES, is_generated

S = TypeVar("S", bound=Settings)
LISTS = ("policies", "budgets", "tasks", "lengths", "task_file", "files")


def filled(settings: S, output: Path) -> S:
    """The settings with all that commands asked in this folder which differ from this one in lists alone.

    Raises:
        UserError: what an earlier command asked cannot be read.
    """
    for run in read_runs(output)[0]:
        before = run.get("settings")
        if not isinstance(before, dict) or any(_differs(settings, before, name) for name in before):
            continue
        changes: dict[str, Any] = {
            name: tuple(dict.fromkeys([*before[name], *getattr(settings, name)])) for name in LISTS if name in before
        }
        generated = isinstance(settings, TaskSettings) and all(map(is_generated, settings.tasks))
        try:
            if isinstance(settings, TextSettings):
                named = ",".join(dict.fromkeys(f"{before['positions']},{settings.positions}".split(",")))
                changes["positions"] = named
            limits = [limit or (GENERATED_SAMPLES if generated else 0) for limit in (before["limit"], settings.limit)]
            changes["limit"] = max(limits) if all(limits) else None
            settings = type(settings)(**{**settings.model_dump(), **changes})
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"--fill: what an earlier command in {output} asked cannot be read: {error}") from error
    return settings


def _differs(settings: Settings, before: dict[str, Any], name: str) -> bool:
    if name in (*LISTS, "limit", "attn_implementation") or (name == "positions" and isinstance(settings, TextSettings)):
        return False
    return bool(settings.as_json().get(name) != before[name])
