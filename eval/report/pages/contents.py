"""The sections of a report, each only if there is something to show."""

from __future__ import annotations

from collections.abc import Sequence

from ...tables.table import Table
from ..comparison import comparison_tables, difference_table
from ..counts import count_table
from ..depths import depths_by_task, mean_by_depth
from ..figures import (
    agreement_plot,
    efficiency_plot,
    hits_over_layers,
    overview,
    score_over_buckets,
    score_over_length,
    score_plots,
    text_plots,
)
from ..leaderboard import leaderboard, model_table, standing_table
from ..measures import agreement_table, course_table, efficiency_tables, hit_table
from ..runs import Run
from ..scores import every_score, score_tables
from .page import Section
from .texts import text_table


def sections(runs: Sequence[Run]) -> list[Section]:
    """All sections, before anything is drawn; some may turn out to be empty."""
    answered = [run for run in runs if run.rows]
    standings = (*_some(leaderboard(answered)), *_some(model_table(answered))) if answered else ()
    by_depth, depths = _some(mean_by_depth(runs)), _some(depths_by_task(runs))
    behind = _some(standing_table(answered)) if answered else ()
    page_sections = [
        Section("overview", "Overview", standings, behind, joint=lambda runs: (overview(runs),)),
        Section(
            "scores",
            "Scores",
            (*score_tables(runs), *_some(course_table(runs))),
            _some(every_score(runs)),
            score_plots,
        ),
        Section("length", "Score over length", plots=lambda run: (score_over_length(run), score_over_buckets(run))),
        Section("needles", "Needles by depth", by_depth or depths, depths if by_depth else ()),
        Section("perplexity", "Perplexity", _some(text_table(runs)), plots=text_plots),
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
        folded, shown = (tables, ()) if sum(len(table.frame) for table in tables) > 60 else ((), tables)
        page_sections.append(
            Section("comparison", "Runs compared", (*_some(difference_table(runs)), *shown), folded, text=text)
        )
    page_sections.append(Section("counts", "Questions and answers", _some(count_table(runs))))
    return page_sections


def _efficiency(runs: Sequence[Run]) -> Section:
    tables = tuple(efficiency_tables(runs))
    shown, folded = (tables, ()) if len(tables) == 1 else ((), tables)
    return Section(
        "efficiency",
        "Latency and memory",
        shown,
        folded,
        lambda run: (efficiency_plot(run, length) for length in run.lengths),
    )


def _some(table: Table | None) -> tuple[Table, ...]:
    return (table,) if table else ()
