"""A table with its numbers, before it is Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

Value = str | int | float | None


class Spread(float):
    """A mean that knows its standard error; None where too few numbers tell."""

    error: float | None

    def __new__(cls, mean: float, error: float | None) -> Spread:
        found = super().__new__(cls, mean)
        found.error = error
        return found


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
        head: leading columns that name a row: a budget and a policy, or a policy.
        grouped: whether a run stands before them, whose rows follow each other.
        shades: how dark a cell is, 0 to 1, by (row, column).
        marked: (row, column) of numbers that the note says something about.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    breaks: frozenset[int] = frozenset()
    head: int = 0
    grouped: bool = False
    shades: Mapping[tuple[int, int], float] = field(default_factory=dict)
    marked: frozenset[tuple[int, int]] = frozenset()

    def text(self, row: int, column: int, absent: str = "-") -> str:
        """A cell as it is shown."""
        value = self.rows[row][column]
        if value is None:
            return absent
        if not isinstance(value, float):
            return str(value)
        digits = self.columns[column].digits
        error = "" if not isinstance(value, Spread) or value.error is None else f" ± {value.error:.{digits}f}"
        return f"{value:.{digits}f}{error}" + ("*" if (row, column) in self.marked else "")

    def is_number(self, column: int) -> bool:
        """Whether a column is aligned to the right."""
        return column not in self._words

    @cached_property
    def _words(self) -> set[int]:
        return {at for row in self.rows for at, value in enumerate(row) if isinstance(value, str)}


def simple_table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "", head: int = 1
) -> Table:
    """A table for the terminal, whose cells are written out already.

    Args:
        head: leading columns that name a row.
    """
    return Table("", title, tuple(map(Column, names)), tuple(map(tuple, rows)), note, head=head)


def without_empty(table: Table) -> Table:
    """The table without the columns in which nothing stands."""
    kept = [at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)]
    rows = tuple(tuple(row[at] for at in kept) for row in table.rows)
    marked = frozenset((row, kept.index(column)) for row, column in table.marked)
    return replace(table, columns=tuple(table.columns[at] for at in kept), rows=rows, marked=marked)


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
    known = {index: value for index, value in numbers.items() if isinstance(value, (int, float))}
    return {index: round(value, digits) for index, value in known.items() if isfinite(value)}


def find_shades(
    rows: Sequence[Sequence[Value]],
    runs: Sequence[object],
    full: Sequence[bool],
    picked: Collection[int],
    better: Callable[[Iterable[float]], float] = max,
) -> dict[tuple[int, int], float]:
    """How near the numbers of the `picked` columns are to the full cache's of their run, 0 to 1.

    The square of the share, so that the last percents can be seen; without a full cache it is a share of the best.

    Args:
        runs: what run each row belongs to.
        full: whether it is the full cache's.
        better: max, or min where less is better.
    """
    shades: dict[tuple[int, int], float] = {}
    for run in dict.fromkeys(runs):
        members = [index for index, other in enumerate(runs) if other == run]
        for column in picked:
            numbers = {at: value for at in members if isinstance(value := rows[at][column], (int, float))}
            aims = [value for at, value in numbers.items() if full[at]] or list(numbers.values())
            aim = better(aims) if aims else 0.0
            for at, value in numbers.items():
                share = _ratio(aim, value) if better is min else _ratio(value, aim)
                shades[at, column] = round(min(max(share, 0.0), 1.0) ** 2, 3)
    return shades


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
