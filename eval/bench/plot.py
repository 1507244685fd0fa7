"""Plots of a benchmark: step time over the context, throughput and latency over the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from ..store.results import Row
from ..tables.plot import budget_axis, line_panels
from ..tables.plot_style import logarithmic, save
from .rows import DECODE, MEASURED, THROUGHPUT

_PANEL = (5.2, 3.9)
#: Times further apart than this need a logarithmic axis.
_WIDE = 6
_ANSWERS = {"tokens_per_second": "tokens per second", "latency_seconds": "seconds until an answer is whole"}


def plot_steps(rows: Sequence[Row], path: Path) -> bool:
    """Draw one panel per budget and batch size, the floors across; False if there is nothing to draw."""
    points = [
        {"panel": f"budget {row['budget']:,} tokens, batch {row['batch_size']}", "policy": row["variant"]}
        | {"x": row["context"], "y": row["step_ms"]}
        for row in _measured(rows, DECODE)
    ]
    return _draw(points, "context (tokens)", "time of a decode step (ms)", path)


def plot_methods(rows: Sequence[Row], path: Path) -> bool:
    """Draw one panel for throughput and one for latency; False if fewer than two budgets were measured."""
    points = [
        {"panel": title, "policy": row["variant"], "x": row["budget"], "y": row[column]}
        for column, title in _ANSWERS.items()
        for row in _measured(rows, THROUGHPUT)
    ]
    several = len({point["x"] for point in points} - {None}) > 1
    return several and _draw(points, "budget (tokens)", "", path)


def _measured(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and row["status"] == MEASURED]


def _draw(points: Sequence[dict[str, Any]], x_name: str, y_name: str, path: Path) -> bool:
    frame = DataFrame(points)
    if frame.empty or frame["x"].isna().all():
        return False
    save(line_panels(frame, x_name, y_name, budget_axis, _from_zero, 2, _PANEL), path)
    return True


def _from_zero(axes: Any, values: Sequence[float]) -> None:
    """Differences look as large as they are; logarithmic where some lines would lie on the ground."""
    if max(values) < _WIDE * min(values):
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        logarithmic(axes.yaxis)
