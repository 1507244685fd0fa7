"""A table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from .table import Table

_WORDS = "backslash asciitilde asciicircum less greater bar".split()
_LATEX = {
    **{sign: f"\\{sign}" for sign in "{}&%$#_"},
    **{sign: rf"\text{word}{{}}" for sign, word in zip("\\~^<>|", _WORDS, strict=True)},
    '"': "''",
    "±": r"$\pm$",
}


def to_markdown(table: Table) -> str:
    """A Markdown table under its title."""
    columns = range(len(table.columns))
    header = [markdown(column.name) for column in table.columns]
    rows = [[_bold(table, row, at, markdown(table.text(row, at)), "**{}**") for at in columns] for row in _rows(table)]
    lines = [f"**{markdown(table.title)}**", "", *markdown_table(header, list(map(table.is_number, columns)), rows)]
    if table.note:
        lines += ["", markdown(table.note)]
    return "\n".join(lines) + "\n"


def markdown_table(header: Sequence[str], numbers: Sequence[bool], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines.

    Args:
        header, rows: cells as they are written.
        numbers: which columns stand on the right.
    """
    rule = "|" + "".join("---:|" if right else "---|" for right in numbers)
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [first, rule, *rest]


def _rows(table: Table) -> range:
    return range(len(table.rows))


def _bold(table: Table, row: int, column: int, text: str, bold: str) -> str:
    return bold.format(text) if (row, column) in table.best else text


def markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def to_csv(table: Table) -> str:
    """All digits of all numbers; what does not exist is empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    spread = {at for row in table.rows for at, value in enumerate(row) if getattr(value, "error", None) is not None}
    names = [(column.name, f"{column.name}, standard error") for column in table.columns]
    writer.writerow([name for at, both in enumerate(names) for name in both[: 1 + (at in spread)]])
    for row in table.rows:
        cells = [(value, getattr(value, "error", None)) for value in row]
        shown = [value for at, both in enumerate(cells) for value in both[: 1 + (at in spread)]]
        writer.writerow(["" if value is None else value for value in shown])
    return stream.getvalue()


def to_latex(table: Table) -> str:
    """A `table` environment; the document needs the packages booktabs and, for wide tables, graphicx."""
    wide = len(table.columns) > 9
    align = "".join("r" if table.is_number(index) else "l" for index in range(len(table.columns)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(table.title)}}}",
        rf"\label{{tab:{table.name}}}",
        r"\small",
        *([r"\resizebox{\linewidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(latex(column.name) for column in table.columns) + r" \\",
        r"\midrule",
    ]
    for row in _rows(table):
        if row and row in table.breaks:
            lines.append(r"\midrule")
        cells = (
            _bold(table, row, at, latex(table.text(row, at)), r"\textbf{{{}}}") for at in range(len(table.columns))
        )
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}" + "}" * wide]
    if table.note:
        lines += ["", rf"\smallskip {latex(table.note)}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
