"""Step time over context, one line per variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator

from ..store.results import Row
from ..tables.plot_style import COLOURS, MARKERS, finish, logarithmic, make_panels, save
from .rows import DECODE, MEASURED
from .variants import (
    FLOOR,
    FLOOR_COMPILED,
    FULL,
    FULL_COMPILED,
    KVPRESS,
    PAGED,
    PAGED_STATIC,
    PAGED_STATIC_OWN,
)

_COLUMNS = 2
_PANEL = (5.2, 3.9)
#: Times further apart than this need a logarithmic axis.
_WIDE = 6
_GREY = "#555555"
#: The same variant looks the same in every plot; a compiled one has the colour of its eager twin and an open marker.
_STYLES: dict[str, dict[str, Any]] = {
    PAGED: {"color": COLOURS[0], "marker": MARKERS[0]},
    PAGED_STATIC: {"color": COLOURS[0], "marker": MARKERS[0], "linestyle": "--", "markerfacecolor": "white"},
    PAGED_STATIC_OWN: {"color": COLOURS[3], "marker": MARKERS[3], "linestyle": "--", "markerfacecolor": "white"},
    FULL: {"color": COLOURS[1], "marker": MARKERS[1]},
    KVPRESS: {"color": COLOURS[2], "marker": MARKERS[2]},
    FULL_COMPILED: {"color": COLOURS[1], "marker": MARKERS[1], "linestyle": "--", "markerfacecolor": "white"},
    FLOOR: {"color": _GREY, "marker": "", "linestyle": "-."},
    FLOOR_COMPILED: {"color": _GREY, "marker": "", "linestyle": ":"},
}


def plot_steps(rows: Sequence[Row], path: Path) -> bool:
    """Draw one panel per budget and batch size; False if there is nothing to draw."""
    measured = [row for row in rows if row["kind"] == DECODE and row["status"] == MEASURED]
    groups = list(dict.fromkeys((row["budget"], row["batch_size"]) for row in measured))
    if not any(row["context"] for row in measured):
        return False
    columns = min(_COLUMNS, len(groups))
    figure, panels = make_panels(len(groups), columns, _PANEL)
    for axes, (budget, batch) in zip(panels, groups, strict=True):
        _draw(axes, [row for row in measured if (row["budget"], row["batch_size"]) == (budget, batch)])
        axes.set_title(f"budget {budget:,} tokens, batch {batch}", fontsize=11)
    save(finish(figure, panels, columns, "context (tokens)", "time of a decode step (ms)"), path)
    return True


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    contexts = sorted({row["context"] for row in rows if row["context"] is not None})
    edges = [contexts[0] / 1.3, contexts[-1] * 1.3] if contexts else [1, 2]
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = sorted((row for row in rows if row["variant"] == name), key=lambda row: row["context"] or 0)
        style = {"linestyle": "-", "linewidth": 1.6, "markersize": 6, "label": name} | _STYLES[name]
        if mine[0]["context"] is None:
            axes.plot(edges, [mine[0]["step_ms"]] * 2, **style)
            continue
        middle = [row["step_ms"] for row in mine]
        below = [row["step_ms"] - row["step_ms_lowest"] for row in mine]
        above = [row["step_ms_highest"] - row["step_ms"] for row in mine]
        axes.errorbar([row["context"] for row in mine], middle, yerr=[below, above], capsize=2, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(*edges)
    _step_axis(axes, [row["step_ms"] for row in rows])


def _step_axis(axes: Any, times: Sequence[float]) -> None:
    """From zero, where differences look as large as they are; logarithmic where some lines would lie on the ground."""
    if max(times) < _WIDE * min(times):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    logarithmic(axes.yaxis)
