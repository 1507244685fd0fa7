"""A table for the terminal, whatever its width: numbers stay whole, and long names get a line of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from .table import Table

#: Blanks between columns, and characters of a word above one that is not broken.
_GAP, _WORD = 3, 10


def to_terminal(table: Table, *parts: Table) -> RenderableType:
    """A table, and its parts below it, side by side where they fit; the best of a column in bold."""
    return _Shown(table, parts)


class _Shown:
    def __init__(self, table: Table, parts: Sequence[Table]) -> None:
        self.table, self.parts = table, parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        yield from _fitted(self.table, width)
        if all(_least(part) <= width for part in self.parts):
            yield Columns([_plain(part, width) for part in self.parts], padding=(0, 2))
        else:
            for part in self.parts:
                yield from _fitted(part, width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _fitted(table: Table, width: int) -> Iterator[RenderableType]:
    if _least(table) <= width:
        shown = _plain(table, width)
        shown.min_width = min(len(table.title), width)  # a narrow table does not break its title
        yield shown
    else:
        yield from _stacked(table, width)


def _plain(table: Table, width: int) -> RichTable:
    shown = RichTable(
        title=Text(table.title) if table.title else None,
        caption=Text(table.note) if table.note else None,
        title_justify="left",
        caption_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    names = {at: _longest(table, at) for at in range(table.head)}
    for at, size in (names | _sizes(table, width - _taken(names))).items():
        name = Text(table.columns[at].name)
        shown.add_column(name, justify="left" if at in names else "right", width=size, overflow="fold")
    for row in range(len(table.rows)):
        shown.add_row(*(_cell(table, row, at) for at in range(len(table.columns))))
    return shown


def _stacked(table: Table, width: int) -> Iterator[RenderableType]:
    """The names of a row on a line of their own, its numbers below; as many blocks of columns as the width asks for."""
    if table.title:
        yield Text(table.title)
    sizes = _sizes(table, width)
    for columns in _blocks(sizes, width):
        widths = [sizes[at] for at in columns]
        yield Text("  ".join(column.name for column in table.columns[: table.head]), style="bold")
        yield _line([Text(table.columns[at].name, style="bold") for at in columns], widths)
        for row in range(len(table.rows)):
            yield Text("  ".join(text for at in range(table.head) if (text := table.text(row, at, absent=""))))
            yield _line([_cell(table, row, at) for at in columns], widths)
        yield ""
    if table.note:
        yield Text(table.note)


def _line(cells: Sequence[Text], widths: Sequence[int]) -> RichTable:
    line = RichTable.grid(padding=(0, 0, 0, _GAP), pad_edge=True)
    for size in widths:
        line.add_column(justify="right", width=size + _GAP, overflow="fold")
    line.add_row(*cells)
    return line


def _sizes(table: Table, width: int) -> dict[int, int]:
    """Of the columns of numbers: room for the longest word, and for the longest cell where all fit so."""
    numbers = range(table.head, len(table.columns))
    sizes = {at: _longest_word(table, at) for at in numbers}
    for wish in (_longest_word_above, _longest):
        for at in numbers:
            wider = sizes | {at: max(sizes[at], wish(table, at))}
            sizes = wider if _taken(wider) <= width else sizes
    return sizes


def _taken(sizes: Mapping[int, int]) -> int:
    return sum(sizes.values()) + _GAP * len(sizes)


def _blocks(sizes: Mapping[int, int], width: int) -> Iterator[list[int]]:
    """Columns that fit side by side."""
    block: list[int] = []
    for at in sizes:
        if block and _taken({other: sizes[other] for other in (*block, at)}) > width:
            yield block
            block = []
        block.append(at)
    yield block


def _cell(table: Table, row: int, column: int) -> Text:
    return Text(table.text(row, column, absent=""), style="bold" if (row, column) in table.best else "")


def _texts(table: Table, column: int) -> list[str]:
    return [table.text(row, column, absent="") for row in range(len(table.rows))]


def _longest(table: Table, column: int) -> int:
    """Characters of the longest cell, and of the longest word above."""
    return max([*map(len, _texts(table, column)), _longest_word_above(table, column)])


def _longest_word_above(table: Table, column: int) -> int:
    return min(max(map(len, table.columns[column].name.split()), default=0), _WORD)


def _longest_word(table: Table, column: int) -> int:
    return max((len(word) for text in _texts(table, column) for word in text.split()), default=0)


def _least(table: Table) -> int:
    """Columns of the terminal without which names or numbers would be cut."""
    names = {at: _longest(table, at) for at in range(table.head)}
    return _taken(names | {at: _longest_word(table, at) for at in range(table.head, len(table.columns))})
