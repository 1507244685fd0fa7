"""A table in a terminal of any width: names and numbers stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, MultiIndex
from rich.console import Console

from .table import Table


def show(console: Console, table: Table, parts: Sequence[Table] = ()) -> None:
    """Print a table, and its parts below it. Columns that do not fit beside the others stand below them."""
    for one in (table, *parts):
        cells = [[cell.text for cell in line.cells] for line in one.lines]
        index = MultiIndex.from_tuples([line.names for line in one.lines], names=one.names)
        frame = DataFrame(cells, index, one.columns, dtype=object)
        frame = frame.reset_index(level=list(range(1, len(one.names))))
        text = frame.to_string(line_width=console.width, col_space=2) if len(frame.columns) else "\n".join(frame.index)
        _print(console, f"{one.title}\n{text}\n".lstrip("\n"))
    for caption in dict.fromkeys(one.caption for one in (table, *parts) if one.caption):
        _print(console, caption)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False)
