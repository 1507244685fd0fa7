"""The sections of a report, each only if there is something to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...tables.table import Table
from ..comparison import comparison_tables, difference_table
from ..depths import depth_table
from ..figures import (
    Plot,
    agreement_plot,
    efficiency_plot,
    overview,
    score_over_buckets,
    score_over_length,
    score_plots,
    text_plots,
)
from ..leaderboard import leaderboard
from ..measures import agreement_table, course_table, efficiency_tables, text_table
from ..runs import Run
from ..scores import score_tables
from .page import Section


def sections(runs: Sequence[Run]) -> Iterator[Section]:
    """All sections, before anything is drawn; some may turn out to be empty."""
    answered = [run for run in runs if run.rows]
    boards = _some(leaderboard(answered)) if answered else []
    yield Section("overview", "Overview", boards, (plot for plot in [overview(runs)] if plot))
    scores = _some(*score_tables(runs), course_table(runs))
    yield Section("scores", "Scores", scores, _of_each(runs, score_plots))
    over_length = _of_each(runs, lambda run: (score_over_length(run), score_over_buckets(run)))
    yield Section("length", "Score over length", plots=over_length)
    yield Section("needles", "Needles by depth", _some(depth_table(runs)))
    yield Section("perplexity", "Perplexity", _some(text_table(runs)), _of_each(runs, text_plots))
    agreements = _of_each(runs, lambda run: [agreement_plot(run)])
    yield Section("agreement", "Agreement with the full cache", _some(agreement_table(runs)), agreements)
    costs = _of_each(runs, lambda run: (efficiency_plot(run, length) for length in run.lengths))
    yield Section("efficiency", "Latency and memory", efficiency_tables(runs), costs)
    if len(runs) > 1:
        tables = comparison_tables(runs)
        text = "" if tables else "The runs have no question under the same policy and budget in common."
        yield Section("comparison", "Runs compared", [*_some(difference_table(runs)), *tables], text=text)


def _some(*tables: Table | None) -> list[Table]:
    return [table for table in tables if table]


def _of_each(runs: Sequence[Run], draw: Callable[[Run], Iterable[Plot | None]]) -> Iterator[Plot]:
    """The plots of each run; in a report of several runs their numbers tell the files apart."""
    for number, run in enumerate(runs, 1):
        for plot in filter(None, draw(run)):
            if len(runs) > 1:
                plot = replace(plot, name=f"{plot.name}_{number}", caption=f"{run.label}: {plot.caption}")
            yield plot
