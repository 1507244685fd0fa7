"""Plots of a run, legible at the width of a README."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import matplotlib
from matplotlib.ticker import NullLocator

from ...caches.budgets import FULL, parse_budget
from ...errors import UserError
from ..grouping import grouped
from .plot_style import COLUMNS, FULL_STYLE, PANEL, finish, make_panels, policy_styles, titled
from .summary import BINS, Cell, Curve, over_tasks

SHARE_AXIS, TOKEN_AXIS = "budget (share of the prompt)", "budget (tokens per layer)"
SINGLE = (7.2, 4.6)


def mean_accuracy(cells: Sequence[Cell]) -> Any:
    """The figure: mean accuracy over tasks against the budget, one panel per length."""
    groups = {}
    for length in dict.fromkeys(cell.length for cell in cells):
        here = [cell for cell in cells if cell.length == length]
        size = "own lengths" if length is None else f"{length} tokens"
        tasks = list(dict.fromkeys(cell.task for cell in here))
        groups[f"{size}, {f'mean of {len(tasks)} tasks' if len(tasks) > 1 else tasks[0]}"] = over_tasks(here)
    return accuracy_panels(groups, len(groups), SINGLE if len(groups) == 1 else PANEL)


def accuracy_by_task(cells: Sequence[Cell]) -> Any:
    """The figure: accuracy against the budget, one panel per task and length, the full cache as a line."""
    lengths = {cell.length for cell in cells}

    def title(cell: Cell) -> str:
        return cell.task if len(lengths) == 1 or cell.length is None else f"{cell.task}, {cell.length} tokens"

    groups = grouped(cells, title)
    return accuracy_panels(groups, min(COLUMNS, len(groups)), SINGLE if len(groups) == 1 else PANEL)


def accuracy_panels(groups: dict[str, list[Cell]], columns: int, panel: tuple[float, float]) -> Any:
    """The figure: accuracy against the budget, one panel per title."""
    figure, panels = make_panels(len(groups), columns, panel)
    every = [cell for cells in groups.values() for cell in cells]
    styles = policy_styles(_policies(every))
    in_shares = all(_share(cell) for cell in every if cell.policy != FULL)
    for axes, (title, cells) in zip(panels, groups.items(), strict=True):
        _draw_accuracy(axes, cells, styles, in_shares)
        titled(axes, title, panel[0])
    return finish(figure, panels, columns, SHARE_AXIS if in_shares else TOKEN_AXIS, "score in %")


def _draw_accuracy(axes: Any, cells: Sequence[Cell], styles: dict[str, dict[str, Any]], in_shares: bool) -> None:
    for cell in cells:
        if cell.policy == FULL:
            axes.axhline(100 * cell.accuracy, **FULL_STYLE)
    for policy in _policies(cells):
        points = sorted((_place(cell, in_shares), 100 * cell.accuracy) for cell in cells if cell.policy == policy)
        axes.plot(*zip(*points, strict=True), label=policy, **styles[policy])
    budget_axis(axes, [_place(cell, in_shares) for cell in cells if cell.policy != FULL], "%" if in_shares else "")
    score_axis(axes, [100 * cell.accuracy for cell in cells])


def _place(cell: Cell, in_shares: bool) -> float:
    """Where a budget stands on its axis: what was held, as far as prompts of one length make it one number."""
    if not in_shares:
        return cell.tokens or 0
    return 100 * (cell.tokens or 0) / cell.length if cell.length else 100 * float(_share(cell) or 0)


def _share(cell: Cell) -> Fraction | None:
    try:
        return parse_budget(cell.budget).share
    except UserError:  # what another version of this package takes for a budget
        return None


def budget_axis(axes: Any, places: Sequence[float], unit: str = "") -> None:
    """A logarithmic axis with a tick for every budget that has room for one."""
    if not places:
        axes.set_xticks([])
        return
    axes.set_xscale("log", base=2)
    # Labels of budgets less than a fifth of an octave apart would lie over each other.
    ticks: list[float] = []
    for place in sorted(set(places)):
        if not ticks or place > ticks[-1] * 1.15:
            ticks.append(place)
    names = [f"{tick:.3g}{unit}" if unit else f"{tick:.0f}" for tick in ticks]
    crowded = sum(map(len, names)) > 26
    axes.set_xticks(ticks, names, rotation=45 if crowded else 0, fontsize=8 if crowded else 9)
    axes.xaxis.set_minor_locator(NullLocator())
    if len(ticks) == 1:
        axes.set_xlim(ticks[0] / 2, ticks[0] * 2)


def score_axis(axes: Any, scores: Sequence[float]) -> None:
    """From 0 to a round number above all scores: an axis that starts elsewhere makes noise look like a result."""
    top = next(top for top in (5, 10, 20, 30, 40, 60, 80, 100) if top == 100 or top * 0.95 >= max(scores, default=100))
    axes.set_ylim(-0.03 * top, 1.03 * top)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def perplexity_by_position(curves: Sequence[Curve], length: int, window: int | None = None) -> Any:
    """The figure: perplexity against the position in the text, one panel per budget.

    Args:
        length: tokens of the longest text.
        window: tokens that the model was made for, marked where a text passes them.
    """
    full = [curve for curve in curves if curve.policy == FULL]
    budgets = list(dict.fromkeys(curve.budget for curve in curves if curve.policy != FULL)) or [FULL]
    styles = policy_styles(_policies(curves))
    columns = min(2, len(budgets))
    figure, panels = make_panels(len(budgets), columns, PANEL if len(budgets) > 1 else SINGLE, share_y=True)
    for axes, budget in zip(panels, budgets, strict=True):
        for curve in full:
            axes.plot(*_points(curve, length), **FULL_STYLE)
        for curve in (curve for curve in curves if curve.budget == budget and curve.policy != FULL):
            axes.plot(*_points(curve, length), label=curve.policy, **styles[curve.policy] | {"markersize": 3.5})
            axes.set_title(f"budget {budget}: {curve.tokens} tokens", fontsize=11)
        axes.set_yscale("log")
        # A logarithmic axis over less than a decade has no ticks of its own that a person can read.
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
        if window is not None and window < length:
            axes.axvline(
                window, color="#555555", linewidth=1.2, linestyle=":", label=f"model's window: {window} tokens"
            )
        if length >= 10_000:  # numbers of six digits would run into each other
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
            axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k" if tokens else "0")
    return finish(figure, panels, columns, "position in the text (tokens)", "perplexity")


def _points(curve: Curve, length: int) -> tuple[list[float], list[float]]:
    """Middles of the bins that a text reaches, and the perplexity there."""
    found = [(index, value) for index, value in enumerate(curve.by_position) if value is not None]
    return [(index + 0.5) * length / BINS for index, _ in found], [value for _, value in found]


def _policies(items: Sequence[Cell] | Sequence[Curve]) -> list[str]:
    return [name for name in dict.fromkeys(item.policy for item in items) if name != FULL]
