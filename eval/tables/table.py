"""A table with its numbers, before it is Markdown, CSV, LaTeX, HTML or shown in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame, Series, isna

from ..caches.budgets import FULL
from .means import Mean

#: Below a table with marked numbers.
NOTHING_EVICTED = "* nothing was evicted: the budget holds all of it"
#: The full cache in the column of policies.
FULL_CACHE = "full cache"


class Cell(NamedTuple):
    """A cell as it is shown.

    Attributes:
        text: empty for a number that does not exist.
        bold: the best of its group.
        shade: how near it is to the full cache's, 0 to 1; None where that is not said.
    """

    text: str
    bold: bool
    shade: float | None


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        names: what it is about.
        breaks: whether it begins a group.
    """

    names: tuple[str, ...]
    cells: tuple[Cell, ...]
    breaks: bool


@dataclass(frozen=True)
class Table:
    """Numbers, texts and `Mean`s under columns; None is a number that does not exist.

    Attributes:
        name: of its files, and its anchor.
        title: one line.
        frame: names of the lines are its index. Lines with the same names but the last are a group, within which
            numbers are compared; those of the level `run` are shaded together.
        digits: behind the point; of all columns, or by column, 2 where nothing is said.
        note: what a reader has to know.
        best: columns whose best number is bold in each group, the full cache aside, unless all are equal; they are
            shaded, too.
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
        return [str(name) for name in self.frame.columns]

    @property
    def grouped(self) -> bool:
        """Whether lines stand below the run that they are of."""
        return self.names[0] == "run"

    @cached_property
    def caption(self) -> str:
        """The note, and what a mark means where there is one."""
        marked = any(isinstance(value, Mean) and value.held for value in self.frame.to_numpy().flat)
        return f"{self.note} {NOTHING_EVICTED}".strip() if marked else self.note

    @cached_property
    def right(self) -> list[bool]:
        """Which columns are aligned to the right."""
        return [not any(isinstance(value, str) for value in self.frame[name]) for name in self.frame.columns]

    @cached_property
    def lines(self) -> list[Line]:
        """The lines as they are shown."""
        bold, shades, groups = self._bold(), self._shades(), self._groups
        cells = [
            [
                Cell(self._text(value, name), bool(is_best), None if isna(shade) else float(shade))
                for value, is_best, shade in zip(self.frame[name], bold[name], shades[name], strict=True)
            ]
            for name in self.frame.columns
        ]
        index = self.frame.index.to_frame(index=False).astype(object)
        return [
            Line(
                tuple("" if isna(name) else str(name) for name in names),
                tuple(column[at] for column in cells),
                at > 0 and groups[at] != groups[at - 1],
            )
            for at, names in enumerate(index.itertuples(index=False, name=None))
        ]

    def _digits(self, column: str) -> int:
        return self.digits if isinstance(self.digits, int) else self.digits.get(column, 2)

    def _text(self, value: Any, column: str) -> str:
        digits = self._digits(column)
        if isinstance(value, Mean):
            error = "" if value.error is None else f" ± {value.error:.{digits}f}"
            return f"{value.value:.{digits}f}{error}{'*' * value.held}"
        if isna(value):
            return ""
        return f"{value:.{digits}f}" if isinstance(value, (float, np.floating)) else str(value)

    @cached_property
    def _groups(self) -> list[Any]:
        index = self.frame.index
        return list(index.droplevel(-1)) if index.nlevels > 1 else [0] * len(index)

    @cached_property
    def _full(self) -> Any:
        return self.frame.index.get_level_values(-1).isin([FULL, FULL_CACHE])

    def _bold(self) -> Mapping[Any, Any]:
        bold = {name: np.zeros(len(self.frame), bool) for name in self.frame.columns}
        for name in self.best:
            shown = Series(numbers(self.frame[name]).round(self._digits(name)).to_numpy())
            groups = shown.mask(self._full | np.isinf(shown)).groupby([Series(self._groups, dtype=object).map(str)])
            low, high = groups.transform("min"), groups.transform("max")
            bold[name] = (shown.eq(low if self.lowest else high) & low.ne(high) & ~self._full).to_numpy()
        return bold

    def _shades(self) -> Mapping[Any, Any]:
        """The square of the share of the full cache's number (else of the best), so that the last percents are seen."""
        shades = {name: np.full(len(self.frame), nan) for name in self.frame.columns}
        runs = self.frame.index.get_level_values("run") if self.grouped else np.zeros(len(self.frame))
        for name in self.best:
            values = numbers(self.frame[name])
            finite = values.where(np.isfinite(values))
            of_full, of_all = (
                some.groupby(runs).transform("min" if self.lowest else "max")
                for some in (finite.where(self._full), finite)
            )
            aim = of_full.fillna(of_all)
            share = (aim / finite if self.lowest else finite / aim).where(finite.notna())
            share = share.replace([np.inf, -np.inf], 0.0).fillna(0.0).where(finite.notna())
            shades[name] = (share.clip(0, 1).round(9) ** 2).round(3).to_numpy()
        return shades


def numbers(values: Iterable[Any]) -> Series:
    """Values of means, and numbers; not-a-number for all others."""
    floats = [float(value) if isinstance(value, (Mean, int, float, np.number)) else nan for value in values]
    return Series(floats, dtype=float)


def simple_table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "", head: int = 1
) -> Table:
    """A table without the columns in which nothing stands.

    Args:
        head: leading columns that name a line.
    """
    frame = DataFrame([list(row) for row in rows], columns=list(names), dtype=object)
    empty = [name for name in names[1:] if all(value is None or value == "" for value in frame[name])]
    return Table(
        "", title, frame.drop(columns=empty).set_index([name for name in names[:head] if name not in empty]), note=note
    )
