"""Perplexities of runs over texts."""

from __future__ import annotations

from collections.abc import Sequence

from ...store.results import Row
from ...store.summaries.summary import Curve, curves
from ...store.summaries.table import Column, Spread, Table, Value
from ..runs import Run
from ..scores import Line, lines_of, table_of_lines


def text_table(runs: Sequence[Run]) -> Table | None:
    """Perplexity of every policy at every budget."""
    columns = [Column("budget in tokens"), Column("perplexity"), Column("against the full cache (%)", 1)]
    columns += [Column("predicted tokens")]
    lines = [line for line in lines_of(runs) if line.run.texts]

    def values(line: Line) -> list[Value]:
        found = curve_of(line)
        full = next((curve_of(other) for other in lines if other.run is line.run and other.group is None), None)
        if found is None:
            return []
        more = 100 * (found.perplexity / full.perplexity - 1) if full and line.group else None
        return [found.tokens, Spread(found.perplexity, found.error), more, found.predicted]

    def behind(line: Line, at: int) -> list[Row]:
        return _rows_of(line) if at in (1, 2) else []

    title = "Perplexity: lower is better"
    return table_of_lines("perplexity", title, lines, columns, values, best=[1], better=min, behind=behind)


def curve_of(line: Line) -> Curve | None:
    """The perplexity of one policy at one budget."""
    found = curves(_rows_of(line))
    return found[0] if found else None


def _rows_of(line: Line) -> list[Row]:
    return [row for row in line.run.texts if (row["policy"], row["budget"]) == line.variant]
