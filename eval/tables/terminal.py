"""A table for the terminal, whatever its width: names and numbers stay whole."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from .table import Cell, Table


def to_terminal(table: Table, *parts: Table) -> RenderableType:
    """A table, and its parts below it, side by side where they fit; the best of a column in bold."""
    return _Shown(table, parts)


class _Shown:
    def __init__(self, table: Table, parts: tuple[Table, ...]) -> None:
        self.table, self.parts = table, parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield from _fitted(console, self.table, width)
        drawn = [_grid(part) for part in self.parts]
        if drawn and all(_least(console, part) <= width for part in drawn):
            yield Columns(drawn, padding=(0, 2))
        else:
            for part in self.parts:
                yield from _fitted(console, part, width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _least(console: Console, drawn: RichTable) -> int:
    """Columns of the terminal without which names or numbers would be cut."""
    return sum((column.min_width or 0) + 3 for column in drawn.columns)


def _fitted(console: Console, table: Table, width: int) -> Iterator[RenderableType]:
    drawn = _grid(table)
    if _least(console, drawn) <= width:
        drawn.min_width = min(len(table.title), width)  # a narrow table does not break its title
        yield drawn
    else:
        yield from _stacked(table)


def _grid(table: Table) -> RichTable:
    drawn = RichTable(
        title=Text(table.title) if table.title else None,
        caption=Text(table.caption) if table.caption else None,
        title_justify="left",
        caption_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for at, name in enumerate(table.names):
        longest = max([len(name), *(len(line.names[at]) for line in table.lines)])
        drawn.add_column(Text(name), no_wrap=True, min_width=longest)
    for at, name in enumerate(table.columns):
        words = [word for line in table.lines for word in line.cells[at].text.split()]
        title = min(max(map(len, name.split()), default=0), 10)  # longer words are broken
        longest = max([title, *map(len, words)])
        drawn.add_column(Text(name), justify="right", min_width=longest, overflow="fold")
    for line in table.lines:
        drawn.add_row(*map(Text, line.names), *map(_cell, line.cells))
    return drawn


def _cell(cell: Cell) -> Text:
    return Text(cell.text, style="bold" if cell.bold else "")


def _stacked(table: Table) -> Iterator[RenderableType]:
    """The names of a line by themselves, and its numbers below, each behind the name of its column."""
    if table.title:
        yield Text(table.title)
    yield Text("  ".join(table.names), style="bold")
    pairs = [
        [
            Text.assemble(f"{name}: ", _cell(cell))
            for name, cell in zip(table.columns, line.cells, strict=True)
            if cell.text
        ]
        for line in table.lines
    ]
    longest = max((len(pair) for line in pairs for pair in line), default=1)
    for line, shown in zip(table.lines, pairs, strict=True):
        yield Text("  ".join(filter(None, line.names)))
        yield Columns(shown, width=longest, padding=(0, 3))
    if table.caption:
        yield Text(table.caption)
