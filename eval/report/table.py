"""A table with its numbers, before it is Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: with the unit.
        digits: behind the point, of floats.
    """

    name: str
    digits: int = 2


@dataclass(frozen=True)
class Table:
    """Rows under columns; None is a number that does not exist.

    Attributes:
        name: of its files, and its anchor.
        title: one line.
        note: what a reader has to know, below it.
        best: (row, column) of the best numbers among those that may be compared.
        breaks: rows that begin a group.
        head: leading columns that name a row: a budget and a policy, with the run before them if there are several.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    breaks: frozenset[int] = frozenset()
    head: int = 0

    def text(self, row: int, column: int, absent: str = "-") -> str:
        """A cell as it is shown."""
        value = self.rows[row][column]
        if value is None:
            return absent
        return f"{value:.{self.columns[column].digits}f}" if isinstance(value, float) else str(value)

    def is_number(self, column: int) -> bool:
        """Whether a column is aligned to the right."""
        return not any(isinstance(row[column], str) for row in self.rows)


def without_empty(table: Table) -> Table:
    """The table without the columns in which nothing stands."""
    kept = [at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)]
    rows = tuple(tuple(row[at] for at in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[at] for at in kept), rows=rows)


def find_best(
    rows: Sequence[Sequence[Value]],
    columns: Sequence[Column],
    groups: Sequence[object],
    picked: Collection[int],
    better: Callable[[Iterable[float]], float] = max,
) -> frozenset[tuple[int, int]]:
    """The best number of each of the `picked` columns within each group of rows; none where all look the same.

    Args:
        groups: what group each row belongs to; rows of group None are not compared.
        better: max or min.
    """
    best: set[tuple[int, int]] = set()
    for group in {group for group in groups if group is not None}:
        members = [index for index, other in enumerate(groups) if other == group]
        for column in picked:
            shown = _shown(rows, members, column, columns[column].digits)
            winners = [index for index, value in shown.items() if value == better(shown.values())]
            if len(winners) < len(shown):
                best |= {(index, column) for index in winners}
    return frozenset(best)


def _shown(rows: Sequence[Sequence[Value]], members: Sequence[int], column: int, digits: int) -> dict[int, float]:
    numbers = {index: rows[index][column] for index in members}
    return {index: round(value, digits) for index, value in numbers.items() if isinstance(value, (int, float))}
