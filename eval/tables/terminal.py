"""A table in a terminal of any width: names and numbers stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .table import Table


def show(console: Console, table: Table, parts: Sequence[Table] = ()) -> None:
    """Print a table, and its parts below it, side by side where they fit; the best of a column in bold."""
    for columns in _split(table, console.width):
        console.print(_grid(table, columns, console.width))
    beside = all(len(_split(part, console.width)) == 1 for part in parts)
    if beside:
        console.print(Columns([_grid(part, range(len(part.columns)), 0) for part in parts], padding=(0, 2)))
    for part in () if beside else parts:
        show(console, part)
    for caption in dict.fromkeys(shown.caption for shown in (table, *(parts if beside else ())) if shown.caption):
        console.print(Text(caption))


def _widths(table: Table) -> tuple[list[int], list[int]]:
    """Letters that the names of lines take, and that each column takes at least, where its title is broken."""
    names = [max([len(name), *(len(line.names[at]) for line in table.lines)]) for at, name in enumerate(table.names)]
    words = [
        [word for line in table.lines for word in line.cells[at].text.split()] + [name[:10] for name in title.split()]
        for at, title in enumerate(table.columns)
    ]
    return names, [max(map(len, column), default=1) for column in words]


def _split(table: Table, width: int) -> list[list[int]]:
    """The columns in groups that fit beside the names, one at least in each."""
    names, columns = _widths(table)
    room = width - sum(names) - 3 * len(names)
    groups: list[list[int]] = [[]]
    for at in range(len(columns)):
        if groups[-1] and sum(columns[other] + 3 for other in [*groups[-1], at]) > room:
            groups.append([])
        groups[-1].append(at)
    return groups


def _grid(table: Table, columns: Sequence[int], width: int) -> RichTable:
    names, widths = _widths(table)
    grid = RichTable(title=table.title and Text(table.title), title_justify="left", title_style="", box=SIMPLE_HEAD)
    grid.pad_edge, grid.min_width = False, min(len(table.title), width)  # a narrow table does not break its title
    for name, width in zip(table.names, names, strict=True):
        grid.add_column(Text(name), no_wrap=True, min_width=width)
    for at in columns:
        grid.add_column(Text(table.columns[at]), justify="right", min_width=widths[at], overflow="fold")
    for line in table.lines:
        cells = [line.cells[at] for at in columns]
        grid.add_row(*map(Text, line.names), *(Text(cell.text, "bold" if cell.bold else "") for cell in cells))
    return grid
