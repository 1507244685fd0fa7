"""How long answers are, whether they end, and whether they go round in circles."""

from __future__ import annotations

from collections.abc import Sequence

from ..store.summaries.summary import mean_of
from ..store.summaries.table import Column, Table, Value
from .runs import Run
from .scores import Line, lines_of, table_of_lines


def course_table(runs: Sequence[Run]) -> Table | None:
    """One row per policy and budget, over all tasks; answers that were fed to the model are left out."""
    columns = [Column("tokens", 1), Column("ended (%)", 1), Column("repeated (%)", 1), Column("answers")]

    def values(line: Line) -> list[Value]:
        found = [row for row in line.run.answers(line.variant) if row.get("ended") is not None]
        if not found:
            return []
        measured = (("new_tokens", 1), ("ended", 100), ("repeated", 100))
        return [*(mean_of((row[name] for row in found), scale) for name, scale in measured), len(found)]

    note = (
        "Ended: by the model itself, within what the task allows. Repeated: of all runs of four tokens, those "
        "that stood in the same answer before. A cache that holds too little can make answers longer, or go in circles."
    )
    return table_of_lines("course", "How answers go on and end", lines_of(runs), columns, values, note)
