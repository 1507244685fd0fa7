"""Plots that stay legible at the width of a README, in colours and markers that colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # No window: plots are files.

from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator

from .budgets import FULL
from .perplexity import BINS
from .summary import Cell, Curve, over_tasks

#: Okabe and Ito's palette without its yellow, which is too light for a line.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FULL_STYLE: dict[str, Any] = {"color": "#555555", "linestyle": "--", "linewidth": 1.5, "label": "full cache"}
PANEL = (3.1, 2.7)
COLUMNS = 4


def plot_accuracy(cells: Sequence[Cell], path: Path) -> None:
    """Mean accuracy over tasks against the budget: one panel per length."""
    groups = {
        f"{length} tokens, mean of {len({cell.task for cell in cells})} tasks": [
            cell for cell in over_tasks(cells) if cell.length == length
        ]
        for length in dict.fromkeys(cell.length for cell in cells)
    }
    _accuracy_panels(groups, path, columns=len(groups), panel=(7.2, 4.6) if len(groups) == 1 else PANEL)


def plot_accuracy_by_task(cells: Sequence[Cell], path: Path) -> None:
    """Accuracy against the budget: one panel per task and length."""
    lengths = {cell.length for cell in cells}
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        name = cell.task if len(lengths) == 1 else f"{cell.task}, {cell.length} tokens"
        groups.setdefault(name, []).append(cell)
    _accuracy_panels(groups, path, columns=min(COLUMNS, len(groups)), panel=PANEL)


def _accuracy_panels(groups: dict[str, list[Cell]], path: Path, columns: int, panel: tuple[float, float]) -> None:
    figure, panels = _panels(len(groups), columns, panel)
    policies = _policies([cell for cells in groups.values() for cell in cells])
    for axes, (title, cells) in zip(panels, groups.items(), strict=True):
        _draw_accuracy(axes, cells, policies)
        axes.set_title(title, fontsize=11)
    _finish(figure, panels, columns, "budget (share of the prompt)", "accuracy", path)


def _draw_accuracy(axes: Any, cells: Sequence[Cell], policies: Sequence[str]) -> None:
    for cell in cells:
        if cell.policy == FULL:
            axes.axhline(100 * cell.accuracy, **FULL_STYLE)
    ticks: dict[float, str] = {}
    for index, policy in enumerate(policies):
        mine = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.tokens or 0)
        shares = [100 * (cell.tokens or 0) / cell.length for cell in mine]
        ticks |= {share: f"{share:.3g}%" for share in shares}
        axes.plot(shares, [100 * cell.accuracy for cell in mine], label=policy, **_style(index))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-3, 103)
    axes.set_yticks(range(0, 101, 25), [f"{value}%" for value in range(0, 101, 25)])


def plot_perplexity(curves: Sequence[Curve], length: int, path: Path) -> None:
    """Perplexity against the position in the text: one panel per budget."""
    full = [curve for curve in curves if curve.policy == FULL]
    budgets = list(dict.fromkeys(curve.budget for curve in curves if curve.policy != FULL)) or [FULL]
    policies = _policies(curves)
    columns = min(2, len(budgets))
    figure, panels = _panels(len(budgets), columns, PANEL if len(budgets) > 1 else (7.2, 4.6), share_y=True)
    centres = [(index + 0.5) * length / BINS for index in range(BINS)]
    for axes, budget in zip(panels, budgets, strict=True):
        for curve in full:
            axes.plot(centres, _points(curve), **FULL_STYLE)
        mine = [curve for curve in curves if curve.budget == budget and curve.policy != FULL]
        for curve in mine:
            style = _style(policies.index(curve.policy)) | {"markersize": 3.5}
            axes.plot(centres, _points(curve), label=curve.policy, **style)
            axes.set_title(f"budget {budget}: {curve.tokens} tokens", fontsize=11)
        axes.set_yscale("log")
        # A logarithmic axis over less than a decade has no ticks of its own that a person can read.
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
    _finish(figure, panels, columns, "position in the text (tokens)", "perplexity", path)


def _points(curve: Curve) -> list[float]:
    return [float("nan") if value is None else value for value in curve.by_position]


def _policies(items: Sequence[Cell] | Sequence[Curve]) -> list[str]:
    return [name for name in dict.fromkeys(item.policy for item in items) if name != FULL]


def _style(index: int) -> dict[str, Any]:
    # More policies than colours: the second round is drawn dotted.
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": "-" if index < len(COLOURS) else ":",
        "markersize": 5,
        "linewidth": 1.6,
    }


def _panels(count: int, columns: int, panel: tuple[float, float], share_y: bool = False) -> tuple[Any, list[Any]]:
    rows = -(-count // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(panel[0] * columns, panel[1] * rows), squeeze=False, sharey=share_y
    )
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


def _finish(figure: Any, panels: list[Any], columns: int, x_name: str, y_name: str, path: Path) -> None:
    for index, axes in enumerate(panels):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if index + columns >= len(panels):
            axes.set_xlabel(x_name)
        if index % columns == 0:
            axes.set_ylabel(y_name)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.tight_layout()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4, frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
