"""Plots: a panel for each title, in it a line for each policy, legible at the width of a README."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullLocator
from pandas import DataFrame, concat

from ..caches.budgets import FULL, parse_budget
from ..errors import UserError
from ..store.checks import BINS
from .means import cells_of
from .plot_style import FULL_STYLE, finish, make_panels, policy_styles, uncover

SHARE_AXIS, TOKEN_AXIS = "budget (share of the prompt)", "budget (tokens per layer)"
#: Inches of a panel, alone and among others.
SINGLE, PANEL = (7.2, 4.6), (3.4, 2.9)
#: Given the axes and the numbers along them.
SetAxis = Callable[[Any, Sequence[float]], None]


def line_panels(
    points: DataFrame, x_name: str, y_name: str, x_axis: SetAxis, y_axis: SetAxis, share_y: bool = False
) -> Figure:
    """The figure.

    Args:
        points: `panel` (its title), `policy`, `x` and `y`; the full cache without an x is drawn across.
        share_y: one range for all panels.
    """
    titles = list(dict.fromkeys(points["panel"]))
    columns = 2 if len(titles) == 4 else min(3, len(titles))
    figure, panels = make_panels(titles, columns, SINGLE if len(titles) == 1 else PANEL, share_y)
    styles = policy_styles(name for name in points["policy"].unique() if name != FULL)
    for axes, title in zip(panels, titles, strict=True):
        here = points[points["panel"] == title]
        for policy, line in here.groupby("policy", sort=False):
            style = FULL_STYLE if policy == FULL else {"label": policy, **styles[policy]}
            if line["x"].isna().all():
                axes.axhline(line["y"].iloc[0], **style)
            else:
                present = line.dropna(subset=["x", "y"]).sort_values("x")
                axes.plot(present["x"], present["y"], **style)
        x_axis(axes, here["x"].dropna().tolist())
        y_axis(axes, (points if share_y else here)["y"].dropna().tolist())
    finish(figure, panels, x_name, y_name)
    for axes in panels:  # not before: a legend shows them all alike
        uncover(axes.get_lines())
    return figure


def mean_cells(frame: DataFrame, run: str = "") -> DataFrame:
    """Mean accuracy per length of prompts, under the title of its panel. What lacks a task is left out."""
    titles = {}
    for length, tasks in frame.groupby("length", sort=False)["task"].unique().items():
        over = f"mean of {len(tasks)} tasks" if len(tasks) > 1 else tasks[0]
        title = f"{length} tokens, {over}" if length else over
        titles[length] = f"{run}\n{title}" if run else title
    wanted = frame.groupby("length")["task"].transform("nunique")
    answered = frame.groupby(["length", "policy", "budget"])["task"].transform("nunique")
    cells = cells_of(frame[answered == wanted], ["length", "policy", "budget"], ["task"])
    return cells.assign(panel=cells["length"].map(titles))


def accuracy_by_task(cells: DataFrame) -> Figure:
    """Accuracy against the budget, one panel per task and length."""
    alone = cells["length"].nunique() == 1
    titles = [
        task if alone or not length else f"{task}, {length} tokens"
        for task, length in zip(cells["task"], cells["length"], strict=True)
    ]
    return accuracy_panels(cells.assign(panel=titles))


def accuracy_panels(cells: DataFrame) -> Figure:
    """Accuracy against the budget; in shares of the prompt, where all budgets are.

    Args:
        cells: of `cells_of`, with the title of their `panel`. Budgets stand at what was held, as far as prompts of one
            `length` make it one number.
    """
    evicting = cells["policy"] != FULL
    shares = cells["budget"][evicting].map(_share)
    held = cells["tokens"][evicting].fillna(0).astype(float)
    in_shares = bool(shares.notna().all())
    if in_shares:
        lengths = cells["length"][evicting]
        held = 100 * (held / lengths).where(lengths > 0, shares.astype(float))
    points = cells.assign(x=held, y=cells["score"].map(float))
    x_name, unit = (SHARE_AXIS, "%") if in_shares else (TOKEN_AXIS, "")
    return line_panels(points, x_name, "score in %", partial(budget_axis, unit=unit), score_axis)


def _share(budget: str) -> Fraction | None:
    try:
        return parse_budget(budget).share
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
    crowded = sum(map(len, names)) > 18
    axes.set_xticks(ticks, names, rotation=45 if crowded else 0, fontsize=8 if crowded else 9)
    axes.xaxis.set_minor_locator(NullLocator())
    if len(ticks) == 1:
        axes.set_xlim(ticks[0] / 2, ticks[0] * 2)


def score_axis(axes: Any, scores: Sequence[float]) -> None:
    """From 0 to a round number above all scores: an axis that starts elsewhere makes noise look like a result."""
    top = next(top for top in (5, 10, 20, 30, 40, 60, 80, 100) if top == 100 or top * 0.95 >= max(scores, default=100))
    axes.set_ylim(-0.03 * top, 1.03 * top)
    axes.yaxis.set_major_locator(_round_ticks(5))


def perplexity_by_position(curves: DataFrame, length: int, window: int | None = None) -> Figure:
    """Perplexity against the position in the text, one panel per budget, the full cache in each.

    Args:
        length: tokens of the longest text.
        window: tokens that the model was made for, marked where a text passes them.
    """
    points = curves.explode("by_position", ignore_index=True).assign(y=lambda them: them["by_position"].astype(float))
    points = points.assign(x=(points.groupby(["policy", "budget"]).cumcount() + 0.5) * length / BINS)
    points = points.dropna(subset=["y"])
    if points.empty:  # no loss is a number
        return make_panels([""], 1, SINGLE)[0]
    titles = {one.budget: f"budget {one.budget}: {one.tokens} tokens" for one in curves.itertuples() if one.tokens}
    full = points["policy"] == FULL
    parts = [points[full | (points["budget"] == budget)].assign(panel=title) for budget, title in titles.items()]
    points = concat(parts) if parts else points.assign(panel=FULL)

    def x_axis(axes: Any, places: Sequence[float]) -> None:
        if window is not None and window < length:
            label = f"model's window: {window} tokens"
            axes.axvline(window, color="#555555", linewidth=1.2, linestyle=":", label=label)
        if length >= 10_000:  # numbers of six digits would run into each other
            axes.xaxis.set_major_locator(_round_ticks(5))
            axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k" if tokens else "0")

    return line_panels(points, "position in the text (tokens)", "perplexity", x_axis, _log_axis, share_y=True)


def _log_axis(axes: Any, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    # A logarithmic axis over less than a decade has no ticks of its own that a person can read.
    axes.yaxis.set_major_locator(_round_ticks(6))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())


def _round_ticks(most: int) -> Any:
    return MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
