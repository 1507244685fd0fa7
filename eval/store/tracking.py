"""A finished run in a tracker of experiments, wandb or trackio, through their own interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..errors import UserError
from ..metrics.extra import import_extra
from ..options.settings import Settings
from .completion import Outcome
from .summaries.summary import Cell, Curve

PROJECT = "paged-eviction"


def load_tracker(name: str) -> Any:
    """The package `wandb` or `trackio`, before a run depends on it.

    Raises:
        UserError: it is not installed; says which extra brings it.
    """
    return import_extra(name, name, f"runs with --log-to {name}")


def log_run(name: str, settings: Settings, outcome: Outcome, summary: Sequence[Cell] | Sequence[Curve]) -> None:
    """Log a run that is over: settings as its configuration, each mean as a metric, summary and rows as tables.

    The run is called like the folder of results, in the project `paged-eviction`; everything else, such as who is
    logged in and whether anything leaves this machine, is said by the tracker's own environment variables.

    Args:
        name: "wandb" or "trackio".
        settings: what was asked.
        outcome: its rows, and where they are.
        summary: what the rows were averaged into.

    Raises:
        UserError: the tracker fails. The folder of results is complete by then.
    """
    tracker = load_tracker(name)
    path = outcome.folder.path
    tables = {"summary": [asdict(each) for each in summary], "rows": outcome.rows}
    try:
        run = tracker.init(project=PROJECT, name=path.resolve().name, config=settings.as_json())
        run.log(means(summary) | {what: tracker.Table(dataframe=_frame(rows)) for what, rows in tables.items() if rows})
        run.finish()
    except Exception as error:  # whatever the tracker, or its network, raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--log-to {name}: {reason}; all rows are in {path}, and the same command logs them") from error


def means(summary: Sequence[Cell] | Sequence[Curve]) -> dict[str, float]:
    """Accuracies and perplexities by a name such as `accuracy/passkey/512/keydiff/25%`."""
    found: dict[str, float] = {}
    for each in summary:
        if isinstance(each, Curve):
            found[f"perplexity/{each.policy}/{each.budget}"] = each.perplexity
        else:
            task = each.task if each.length is None else f"{each.task}/{each.length}"
            found[f"accuracy/{task}/{each.policy}/{each.budget}"] = each.accuracy
    return found


def _frame(rows: Sequence[Any]) -> Any:
    import pandas

    return pandas.DataFrame([{name: _plain(value) for name, value in row.items()} for row in rows])


def _plain(value: Any) -> Any:
    """What a cell of a table can show: lists and objects as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, tuple, dict)) else value
