"""Throughput and latency over the budget, one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator

from ..store.results import Row
from ..tables.plot_style import COLOURS, FULL_STYLE, MARKERS, finish, make_panels, save
from .rows import MEASURED, THROUGHPUT
from .variants import FULL

_PANEL = (5.2, 3.9)
_PANELS = {"tokens_per_second": "tokens per second", "latency_seconds": "seconds until an answer is whole"}


def plot_methods(rows: Sequence[Row], path: Path) -> bool:
    """Draw one panel for throughput and one for latency; False if fewer than two budgets were measured."""
    measured = [row for row in rows if row["kind"] == THROUGHPUT and row["status"] == MEASURED]
    budgets = sorted({row["budget"] for row in measured if row["budget"] is not None})
    if len(budgets) < 2:
        return False
    figure, panels = make_panels(len(_PANELS), len(_PANELS), _PANEL)
    for axes, (column, title) in zip(panels, _PANELS.items(), strict=True):
        _draw(axes, measured, budgets, column)
        axes.set_title(title, fontsize=11)
    save(finish(figure, panels, len(_PANELS), "budget (tokens)"), path)
    return True


def _draw(axes: Any, rows: Sequence[Row], budgets: Sequence[int], column: str) -> None:
    for row in rows:
        if row["variant"] == FULL:
            axes.axhline(row[column], **FULL_STYLE)
    names = dict.fromkeys(row["variant"] for row in rows if row["budget"] is not None)
    for index, name in enumerate(names):
        mine = sorted((row for row in rows if row["variant"] == name), key=lambda row: int(row["budget"]))
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot([row["budget"] for row in mine], [row[column] for row in mine], label=name, markersize=6, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
