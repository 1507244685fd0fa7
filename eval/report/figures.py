"""The report's plots: frames of panels, policies and points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator
from pandas import DataFrame, concat

from ..caches.budgets import FULL
from ..tables.means import cells_of
from ..tables.plot import (
    TOKEN_AXIS,
    accuracy_by_task,
    accuracy_panels,
    budget_axis,
    line_panels,
    mean_cells,
    perplexity_by_position,
)
from .measures import agreement, costs
from .runs import Run

Plot = tuple[str, str, Any]
"""Name of the file, what the picture shows, and the figure."""
_LINE = ["policy", "budget"]
_AGREEMENT = {"identical tokens (%)": "identical tokens (%)", "KL (nats)": "KL divergence (nats per token)"}
_COSTS = {
    "prefill (s)": "prefill (s per batch)",
    "time per token (ms)": "time per token (ms)",
    "KV held (MiB per row)": "KV held (MiB per row)",
    "peak memory (MiB)": "peak memory (MiB)",
}


def plots(runs: Sequence[Run]) -> Iterator[Plot]:
    """All of them, made as they are taken, so that few are alive at a time."""
    answered = [run for run in runs if run.rows]
    if answered:
        cells = concat([mean_cells(run.frame, run.label) for run in answered], ignore_index=True)
        yield (
            "overview",
            "Mean score over the tasks, over the budget; the full cache as a line.",
            accuracy_panels(cells),
        )
    for number, run in enumerate(runs, 1):
        for name, caption, figure in _of_run(run):
            if figure is not None:
                yield (
                    (name, caption, figure)
                    if len(runs) == 1
                    else (f"{name}_{number}", f"{run.label}: {caption}", figure)
                )


def _of_run(run: Run) -> Iterator[Plot]:
    if len(run.tasks) > 1:
        caption = "Score over the budget, per task; the full cache as a line."
        yield "scores", caption, accuracy_by_task(cells_of(run.frame))
    if run.texts:
        window, length = run.meta.get("window"), max(row["length"] for row in run.texts)
        figure = perplexity_by_position(run.curves, length, window if isinstance(window, int) else None)
        yield "perplexity", "Perplexity over the position in the text; one panel per budget.", figure
    frame = run.frame[run.frame["policy"] != FULL]
    figure = _over_budget(frame, agreement(frame, _LINE), _AGREEMENT)
    yield "agreement", "Agreement with the full cache over the budget, all tasks.", figure
    for length in run.lengths:
        frame = run.frame[run.frame["length"] == length]
        caption = "Latency and memory over the budget" + (f", prompts of {length} tokens." if length else ".")
        yield f"efficiency_{length or 'own'}", caption, _over_budget(frame, costs(frame, _LINE), _COSTS)


def _over_budget(frame: DataFrame, numbers: DataFrame, names: dict[str, str]) -> Any:
    """A panel per column that has a number; None without one."""
    places = frame.groupby(_LINE)["budget_tokens"].mean().round().rename("x")
    shown = numbers.rename(columns=names).reset_index().melt(_LINE, [*names.values()], "panel", "y")
    points = shown.dropna(subset=["y"]).join(places, on=_LINE)
    if points.empty:
        return None
    points["y"] = points["y"].map(float)

    def from_zero(axes: Any, _: Sequence[float]) -> None:
        axes.set_ylim(0, (axes.get_ylim()[1] or 1) * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))

    return line_panels(points, TOKEN_AXIS, "", budget_axis, from_zero)
