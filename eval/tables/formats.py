"""A table as Markdown and as CSV."""

from __future__ import annotations

from pandas import DataFrame

from .means import Mean
from .table import Table


def to_markdown(table: Table) -> str:
    """A Markdown table under its title."""
    rows = [
        [
            *(markdown(name) or "-" for name in line.names),
            *(f"**{markdown(cell.text)}**" if cell.bold else markdown(cell.text) or "-" for cell in line.cells),
        ]
        for line in table.lines
    ]
    rule = "|" + "---|" * len(table.names) + "---:|" * len(table.columns)
    header, *shown = (f"| {' | '.join(cells)} |" for cells in ([*map(markdown, (*table.names, *table.columns))], *rows))
    lines = [f"**{markdown(table.title)}**", "", header, rule, *shown]
    return "\n".join([*lines, *(["", markdown(table.caption)] if table.caption else [])]) + "\n"


def markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def to_csv(table: Table) -> str:
    """All digits of all numbers; what does not exist is empty."""
    columns = {}
    for name, values in table.frame.items():
        columns[name] = [value.value if isinstance(value, Mean) else value for value in values]
        errors = [value.error if isinstance(value, Mean) else None for value in values]
        if any(error is not None for error in errors):
            columns[f"{name}, standard error"] = errors
        intervals = [getattr(value, "interval", None) or (None, None) for value in values]
        if any(low is not None for low, _ in intervals):
            columns[f"{name}, 95 % from"] = [low for low, _ in intervals]
            columns[f"{name}, to"] = [high for _, high in intervals]
    plain = DataFrame(columns, table.frame.index, dtype=object).reset_index()
    text: str = plain.to_csv(index=False, lineterminator="\n")
    return text
