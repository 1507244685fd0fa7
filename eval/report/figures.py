"""The report's plots: frames of panels, policies and points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pandas import concat

from ..tables.means import cells_of
from ..tables.plot import accuracy_by_task, accuracy_panels, mean_cells, perplexity_by_position
from .runs import Run

Plot = tuple[str, str, Any]
"""Name of the file, what the picture shows, and the figure."""


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
            yield (name, caption, figure) if len(runs) == 1 else (f"{name}_{number}", f"{run.label}: {caption}", figure)


def _of_run(run: Run) -> Iterator[Plot]:
    if len(run.tasks) > 1:
        caption = "Score over the budget, per task; the full cache as a line."
        yield "scores", caption, accuracy_by_task(cells_of(run.frame))
    if run.texts:
        window, length = run.meta.get("window"), max(row["length"] for row in run.texts)
        figure = perplexity_by_position(run.curves, length, window if isinstance(window, int) else None)
        yield "perplexity", "Perplexity over the position in the text; one panel per budget.", figure
