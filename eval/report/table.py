"""A table with its numbers, and what becomes of it: Markdown, CSV, lines in a terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pandas import DataFrame, Series, isna
from rich.console import Console

from ..caches.budgets import FULL
from .means import Mean

#: Below a table with marked numbers.
NOTHING_EVICTED = "* nothing was evicted: the budget holds all of it"


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

    @cached_property
    def caption(self) -> str:
        """The note, and what a mark means where there is one."""
        marked = any(isinstance(value, Mean) and value.held for value in self.frame.to_numpy().flat)
        return f"{self.note} {NOTHING_EVICTED}".strip() if marked else self.note

    @cached_property
    def texts(self) -> DataFrame:
        """The cells as they are shown."""
        columns = [[_text(value, self._digits(name)) for value in values] for name, values in self.frame.items()]
        return DataFrame(dict(enumerate(columns)), self.frame.index, dtype=object).set_axis(self.frame.columns, axis=1)

    @cached_property
    def bold(self) -> DataFrame:
        """Which cells have the best number of their group."""
        index = self.frame.index
        bold = DataFrame(False, index, self.frame.columns)
        full = index.get_level_values(-1) == FULL
        groups = [str(name) for name in index.droplevel(-1)] if index.nlevels > 1 else [""] * len(index)
        for name in self.best:
            floats = [float(value) if isinstance(value, (Mean, int, float)) else np.nan for value in self.frame[name]]
            shown = Series(floats, dtype=float).round(self._digits(name)).mask(full)
            by_group = shown.replace(np.inf, np.nan).groupby(groups)
            low, high = by_group.transform("min"), by_group.transform("max")
            bold[name] = (shown.eq(low if self.lowest else high) & low.ne(high)).to_numpy()
        return bold

    def _digits(self, column: str) -> int:
        return self.digits if isinstance(self.digits, int) else self.digits.get(column, 2)

    def markdown(self) -> str:
        """A Markdown table under its title."""
        names, columns = self.frame.index.names, self.frame.columns
        header = [markdown(str(name)) for name in (*names, *columns)]
        lines = [header, ["---"] * len(names) + ["---:"] * len(columns)]
        for line, cells, bold in zip(self.frame.index, self.texts.to_numpy(), self.bold.to_numpy(), strict=True):
            shown = [
                f"**{markdown(cell)}**" if best else markdown(cell) for cell, best in zip(cells, bold, strict=True)
            ]
            lines.append([cell or "-" for cell in (*map(markdown, line if len(names) > 1 else [line]), *shown)])
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join(filter(None, [f"**{markdown(self.title)}**", text, markdown(self.caption)])) + "\n"

    def csv(self) -> str:
        """All digits of all numbers; what does not exist is empty."""
        columns: dict[str, list[Any]] = {}
        for name, values in self.frame.items():
            cells = [value if isinstance(value, Mean) else Mean(value) for value in values]
            ends = [cell.interval or (None, None) for cell in cells]
            columns[name] = [cell.value for cell in cells]
            more = {"standard error": [cell.error for cell in cells], "95 % from": [low for low, _ in ends]}
            more["to"] = [high for _, high in ends]
            columns |= {
                f"{name}, {what}": values for what, values in more.items() if any(it is not None for it in values)
            }
        text: str = DataFrame(columns, self.frame.index, dtype=object).to_csv(lineterminator="\n")
        return text

    def show(self, console: Console) -> None:
        """Print it. Columns that do not fit beside the others stand below them."""
        names = self.frame.index.names
        frame = self.texts.reset_index(level=list(range(1, len(names)))).fillna("")
        text = frame.to_string(line_width=console.width, col_space=2) if len(frame.columns) else "\n".join(frame.index)
        lines = [*([self.title] if self.title else []), text, "", *([self.caption] if self.caption else [])]
        console.print("\n".join(lines), markup=False, highlight=False, emoji=False)


def markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)


def _text(value: Any, digits: int) -> str:
    if isinstance(value, Mean):
        error = "" if value.error is None else f" ± {value.error:.{digits}f}"
        if value.interval is not None:
            error = " [{:.0f}, {:.0f}]".format(*value.interval)
        return f"{value.value:.{digits}f}{error}{'*' * value.held}"
    if isna(value):
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def simple_table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], head: int = 1) -> Table:
    """A table without the columns in which nothing stands; `head` leading columns name a line."""
    frame = DataFrame([list(row) for row in rows], columns=list(names), dtype=object)
    frame = frame.dropna(axis="columns", how="all")
    return Table("", title, frame.set_index([name for name in names[:head] if name in frame]))
