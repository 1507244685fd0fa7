"""The sections of a report, each only if there is something to show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...data.longbench.tasks import TASKS
from ...store.grouping import grouped
from ...store.summaries.plot import accuracy_by_task, perplexity_by_position
from ...store.summaries.summary import Cell, curves
from ...store.summaries.table import Table
from ..comparison import comparison_tables, difference_table
from ..counts import count_table
from ..figures import (
    Plot,
    agreement_plot,
    efficiency_plot,
    heat_map,
    hits_over_layers,
    needle_tasks,
    overview,
    score_over_buckets,
    score_over_bytes,
    score_over_length,
)
from ..hits import hit_table
from ..leaderboard import leaderboard, model_table, standing_table
from ..measures import agreement_table, course_table, efficiency_tables
from ..runs import Run
from ..scores import cells_of, every_score, score_tables
from .page import Section
from .texts import text_table


def sections(runs: Sequence[Run]) -> list[Section]:
    """All sections, before anything is drawn; some may turn out to be empty."""
    answered = [run for run in runs if run.rows]
    standings = (*_some(leaderboard(answered)), *_some(model_table(answered)))
    found = [
        Section(
            "overview", "Overview", standings, _some(standing_table(answered)), joint=lambda runs: (overview(runs),)
        ),
        Section(
            "scores",
            "Scores",
            (*score_tables(runs), *_some(course_table(runs))),
            _some(every_score(runs)),
            _score_plots,
        ),
        Section("length", "Score over length", plots=lambda run: (score_over_length(run), score_over_buckets(run))),
        Section("needles", "Needles by depth", plots=lambda run: (heat_map(run, task) for task in needle_tasks(run))),
        Section("perplexity", "Perplexity", _some(text_table(runs)), plots=_text_plots),
        Section(
            "agreement",
            "Agreement with the full cache",
            (*_some(agreement_table(runs)), *_some(hit_table(runs))),
            plots=lambda run: (agreement_plot(run), hits_over_layers(run)),
        ),
        _efficiency(runs),
    ]
    if len(runs) > 1:
        tables = tuple(comparison_tables(runs))
        text = "" if tables else "The runs have no question under the same policy and budget in common."
        folded, shown = (tables, ()) if sum(len(table.rows) for table in tables) > 60 else ((), tables)
        found.append(
            Section("comparison", "Runs compared", (*_some(difference_table(runs)), *shown), folded, text=text)
        )
    found.append(Section("counts", "Questions and answers", _some(count_table(runs))))
    return found


def _efficiency(runs: Sequence[Run]) -> Section:
    tables = tuple(efficiency_tables(runs))
    shown, folded = (tables, ()) if len(tables) == 1 else ((), tables)
    return Section(
        "efficiency",
        "Latency and memory",
        shown,
        folded,
        lambda run: (efficiency_plot(run, length) for length in run.all_lengths),
    )


def _some(table: Table | None) -> tuple[Table, ...]:
    return (table,) if table else ()


def _suite(cell: Cell) -> str:
    task = TASKS.get(cell.task)
    return "others" if task is None else "longbench_e" if task.is_e else "longbench"


def _score_plots(run: Run) -> Iterable[Plot | None]:
    for name, cells in grouped(cells_of(run), _suite).items():
        panels = len({(cell.task, cell.length) for cell in cells})
        caption = "Score over the budget, per task; the full cache as a line."
        yield Plot(f"score_over_budget_{name}", caption, accuracy_by_task(cells), panels)
    yield score_over_bytes(run)


def _text_plots(run: Run) -> Iterable[Plot]:
    if run.texts:
        length = max(row["length"] for row in run.texts)
        figure = perplexity_by_position(curves(run.texts), length, _window(run))
        yield Plot("perplexity", "Perplexity over the position in the text; one panel per budget.", figure, 2)


def _window(run: Run) -> int | None:
    """Tokens that the model was made for, where the run noted it."""
    found = run.sources[0].meta.get("window") if run.sources else None
    return found if isinstance(found, int) else None
