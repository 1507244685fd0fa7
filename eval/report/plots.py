"""The pictures of a report: a panel for each title, in it a line for each policy, legible at the width of a README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FormatStrFormatter, MaxNLocator, NullLocator
from pandas import DataFrame, concat

from ..caches.budgets import FULL
from ..store.checks import BINS
from .means import cells_of, curves
from .runs import Run

#: Okabe and Ito's palette without its yellow, which is too light for a line.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FULL_STYLE: dict[str, Any] = {"color": "#555555", "linestyle": "--", "linewidth": 1.5, "label": "full cache"}
#: Points by which a line below others is wider than they are.
_BROADER = 4
#: Inches of a panel, alone and among others.
SINGLE, PANEL = (7.2, 4.6), (3.4, 2.9)


def pictures(runs: Sequence[Run]) -> Iterator[tuple[str, str, Figure]]:
    """All of them, made as they are taken: the name of the file, what the picture shows, and the figure."""
    frame = concat([run.frame for run in runs])
    if len(frame):
        caption = "Mean score over the tasks, over the budget; the full cache as a line."
        yield "overview", caption, score_panels(mean_cells(frame))
    for number, run in enumerate(runs, 1):
        end, start = (f"_{number}", f"{run.label}: ") if len(runs) > 1 else ("", "")
        if run.frame["task"].nunique() > 1:
            caption = "Score over the budget, per task; the full cache as a line."
            yield f"scores{end}", f"{start}{caption}", score_panels(task_cells(run.frame))
        if len(run.texts):
            caption = "Perplexity over the position in the text; one panel per budget."
            yield f"perplexity{end}", f"{start}{caption}", perplexity_panels(run.texts, run.meta.get("window"))


def mean_cells(frame: DataFrame) -> DataFrame:
    """Mean scores per run and length, under the title of their `panel`. What lacks a task is left out."""
    by = ["run", "length"]
    answered = frame.groupby([*by, "policy", "budget"])["task"].transform("nunique")
    whole = frame[answered == frame.groupby(by)["task"].transform("nunique")]
    cells = cells_of(whole, [*by, "policy", "budget"], ["task"])
    places = zip(cells["run"], cells["length"], strict=True)
    return cells.assign(panel=[f"{run}\n{f'{length} tokens' if length else 'all tasks'}" for run, length in places])


def task_cells(frame: DataFrame) -> DataFrame:
    """Scores per task and length, under the title of their `panel`."""
    cells = cells_of(frame)
    lengths = [f", {length} tokens" * (length > 0 and cells["length"].nunique() > 1) for length in cells["length"]]
    return cells.assign(panel=cells["task"] + lengths)


def score_panels(cells: DataFrame) -> Figure:
    """Scores over the tokens that were held per layer, on the mean over prompts."""

    def set_axes(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
        top = max([5.0, *y])
        axes.set_ylim(-0.03 * top, 1.03 * top)  # from 0: an axis that starts elsewhere makes noise look like a result
        axes.yaxis.set_major_locator(_round_ticks(5))
        ticks: list[float] = []
        for place in sorted(set(x)):  # labels less than a fifth of an octave apart would lie over each other
            ticks += [place] if not ticks or place > ticks[-1] * 1.15 else []
        if ticks:
            axes.set_xscale("log", base=2)
            axes.set_xlim(ticks[0] / 1.2, max(x) * 1.2)
        crowded = sum(len(f"{tick:.0f}") for tick in ticks) > 18
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks], rotation=45 * crowded, fontsize=9 - crowded)
        axes.xaxis.set_minor_locator(NullLocator())

    points = cells.assign(x=cells["tokens"].astype(float), y=cells["score"].map(float))
    return _panels(points, ("budget (tokens per layer)", "score in %"), set_axes)


def perplexity_panels(texts: DataFrame, window: Any = None) -> Figure:
    """Perplexity over the position in the text, one panel per budget, the full cache in each.

    Args:
        texts: see `frame.text_frame`.
        window: tokens that the model was made for, marked where a text passes them.
    """
    table, length = curves(texts), texts["length"].max()
    points = table.explode("by_position", ignore_index=True)
    points = points.assign(y=points["by_position"].astype(float))
    points = points.assign(x=(points.groupby(["policy", "budget"]).cumcount() + 0.5) * length / BINS)
    titles = {one.budget: f"budget {one.budget}: {one.tokens} tokens" for one in table.itertuples() if one.tokens}
    full = points["policy"] == FULL
    parts = [points[full | (points["budget"] == budget)].assign(panel=title) for budget, title in titles.items()]
    points = concat(parts) if parts else points.assign(panel=FULL)

    def set_axes(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
        if isinstance(window, int) and window < length:
            label = f"model's window: {window} tokens"
            axes.axvline(window, color="#555555", linewidth=1.2, linestyle=":", label=label)
        axes.xaxis.set_major_locator(_round_ticks(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_yscale("log")
        # A logarithmic axis over less than a decade has no ticks of its own that a person can read.
        axes.yaxis.set_major_locator(_round_ticks(6))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())

    return _panels(points, ("position in the text (tokens)", "perplexity"), set_axes)


def _round_ticks(most: int) -> Any:
    return MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])


def policy_styles(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A look for each policy, told apart without colours too; dashes are left to the full cache."""
    turns = [(name, *divmod(at, len(COLOURS))) for at, name in enumerate(sorted(set(policies) - {FULL}))]
    looks = {name: {"color": COLOURS[at], "marker": MARKERS[(at + turn) % len(MARKERS)]} for name, turn, at in turns}
    more = {"markersize": 5, "linewidth": 1.6}
    return {name: {**look, "label": name, **more} for name, look in looks.items()} | {FULL: FULL_STYLE}


def _panels(
    points: DataFrame, names: tuple[str, str], set_axes: Callable[[Any, Sequence[float], Sequence[float]], None]
) -> Figure:
    """The figure.

    Args:
        points: `panel` (its title), `policy`, `x` and `y`; the full cache without an x is drawn across.
        names: of the axes.
        set_axes: sets the axes of a panel, given the numbers along them.
    """
    titles, styles = list(points["panel"].unique()), policy_styles(points["policy"])
    columns, size = (2 if len(titles) == 4 else min(3, len(titles))), (SINGLE if len(titles) == 1 else PANEL)
    rows = -(-len(titles) // columns)
    # Not through pyplot: plots are files, and whether a program opens windows is not ours to settle.
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes in grid[len(titles) :]:
        axes.remove()
    legend: dict[str, Any] = {}
    for axes, title in zip(grid, titles, strict=False):
        here = points[points["panel"] == title]
        for policy, line in here.groupby("policy", sort=False):
            if line["x"].isna().all():
                axes.axhline(line["y"].iloc[0], **styles[policy])
            else:
                present = line.dropna(subset=["x", "y"]).sort_values("x")
                axes.plot(present["x"], present["y"], **styles[policy])
        set_axes(axes, here["x"].dropna().tolist(), points["y"].dropna().tolist())
        # As wide as its panel; a dollar sign is one.
        wrapped = [part for line in title.splitlines() for part in wrap(line, int(size[0] * 11))]
        axes.set_title("\n".join(wrapped), fontsize=11, parse_math=False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        legend |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.supxlabel(names[0], fontsize=10)
    figure.supylabel(names[1], fontsize=10)
    wide = int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, legend), default=1)))  # inches of an entry
    entries = figure.legend(
        legend.values(), legend.keys(), loc="outside upper center", ncols=max(1, min(len(legend), wide)), frameon=False
    )
    for text in entries.get_texts():
        text.set_parse_math(False)
    for axes in figure.axes:  # not before: a legend shows them all alike
        _uncover(axes.get_lines())
    return figure


def _uncover(lines: Sequence[Any]) -> None:
    """Widen lines below others that lie on them, so that all can be seen: the lowest most, by `_BROADER` points."""
    for at, line in enumerate(lines):
        mine, others = line.get_xydata(), [other.get_xydata() for other in lines]
        same = [mine.shape == other.shape and np.allclose(mine, other, rtol=0.01) for other in others]
        share = sum(same[at + 1 :]) / max(1, sum(same) - 1)
        line.set(linewidth=line.get_linewidth() + _BROADER * share, markersize=line.get_markersize() + _BROADER * share)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG. Without a date and with fixed ids the same numbers give the same file."""
    with matplotlib.rc_context({"svg.hashsalt": "figure", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
