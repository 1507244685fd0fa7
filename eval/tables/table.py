"""A table with its numbers, before it is Markdown, CSV or shown in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame, Series, isna

from ..caches.budgets import FULL
from .means import Mean

#: Below a table with marked numbers.
NOTHING_EVICTED = "* nothing was evicted: the budget holds all of it"


class Cell(NamedTuple):
    """A cell as it is shown: empty for a number that does not exist, bold for the best of its group."""

    text: str
    bold: bool


class Line(NamedTuple):
    """A line of a table: what it is about, and its cells."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Numbers, texts and `Mean`s under columns; None is a number that does not exist.

    Attributes:
        name: of its files.
        title: one line.
        frame: names of the lines are its index. Lines that have all names but the last in common are a group, within
            which numbers are compared.
        digits: behind the point; of all columns, or by column, 2 where nothing is said.
        note: what a reader has to know.
        best: columns whose best number is bold in each group, the full cache aside, unless all are equal.
        lowest: less is better.
    """

    name: str
    title: str
    frame: DataFrame
    digits: int | Mapping[str, int] = 2
    note: str = ""
    best: Collection[str] = ()
    lowest: bool = False

    @property
    def names(self) -> list[str]:
        """Titles of the columns that name a line."""
        return [str(name) for name in self.frame.index.names]

    @property
    def columns(self) -> list[str]:
        """Titles of the others."""
        return [str(name) for name in self.frame.columns]

    @cached_property
    def caption(self) -> str:
        """The note, and what a mark means where there is one."""
        marked = any(isinstance(value, Mean) and value.held for value in self.frame.to_numpy().flat)
        return f"{self.note} {NOTHING_EVICTED}".strip() if marked else self.note

    @cached_property
    def lines(self) -> list[Line]:
        """The lines as they are shown."""
        columns = []
        for name in self.frame.columns:
            texts = [self._text(value, name) for value in self.frame[name]]
            columns.append([Cell(text, bool(best)) for text, best in zip(texts, self._bold(name), strict=True)])
        index = self.frame.index.to_frame(index=False).astype(object)
        return [
            Line(tuple("" if isna(name) else str(name) for name in names), tuple(column[at] for column in columns))
            for at, names in enumerate(index.itertuples(index=False, name=None))
        ]

    def _digits(self, column: str) -> int:
        return self.digits if isinstance(self.digits, int) else self.digits.get(column, 2)

    def _text(self, value: Any, column: str) -> str:
        digits = self._digits(column)
        if isinstance(value, Mean):
            error = "" if value.error is None else f" ± {value.error:.{digits}f}"
            if value.interval is not None:
                error = " [{:.0f}, {:.0f}]".format(*value.interval)
            tokens = "" if value.tokens is None else f" ({value.tokens})"
            return f"{value.value:.{digits}f}{error}{'*' * value.held}{tokens}"
        if isna(value):
            return ""
        return f"{value:.{digits}f}" if isinstance(value, (float, np.floating)) else str(value)

    def _bold(self, column: str) -> Any:
        """Which lines have the best number of their group."""
        index = self.frame.index
        if column not in self.best:
            return np.zeros(len(index), bool)
        full = index.get_level_values(-1) == FULL
        floats = [float(value) if isinstance(value, (Mean, int, float)) else np.nan for value in self.frame[column]]
        shown = Series(floats, dtype=float).round(self._digits(column)).mask(full)
        groups = [str(name) for name in index.droplevel(-1)] if index.nlevels > 1 else [""] * len(index)
        by_group = shown.replace(np.inf, np.nan).groupby(groups)
        low, high = by_group.transform("min"), by_group.transform("max")
        return shown.eq(low if self.lowest else high) & low.ne(high)


def simple_table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], head: int = 1) -> Table:
    """A table without the columns in which nothing stands.

    Args:
        head: leading columns that name a line.
    """
    frame = DataFrame([list(row) for row in rows], columns=list(names), dtype=object)
    empty = [name for name in names[1:] if all(value is None or value == "" for value in frame[name])]
    return Table("", title, frame.drop(columns=empty).set_index([name for name in names[:head] if name not in empty]))
