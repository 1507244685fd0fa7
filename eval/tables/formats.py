"""A table as Markdown, CSV and LaTeX."""

from __future__ import annotations

from pandas import DataFrame

from .means import Mean
from .table import Table

_WORDS = "backslash asciitilde asciicircum less greater bar".split()
_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "{}&%$#_"},
        **{sign: rf"\text{word}{{}}" for sign, word in zip("\\~^<>|", _WORDS, strict=True)},
        '"': "''",
        "±": r"$\pm$",
    }
)


def to_markdown(table: Table) -> str:
    """A Markdown table under its title."""
    rows = [
        [
            *(markdown(name) or "-" for name in line.names),
            *(f"**{markdown(cell.text)}**" if cell.bold else markdown(cell.text) or "-" for cell in line.cells),
        ]
        for line in table.lines
    ]
    rule = "|" + "---|" * len(table.names) + "".join("---:|" if right else "---|" for right in table.right)
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
    plain = DataFrame(columns, table.frame.index, dtype=object).reset_index()
    text: str = plain.to_csv(index=False, lineterminator="\n")
    return text


def to_latex(table: Table) -> str:
    """A `table` environment; the document needs the packages booktabs and, for wide tables, graphicx."""
    titles = [*table.names, *table.columns]
    wide = len(titles) > 9
    align = "l" * len(table.names) + "".join("r" if right else "l" for right in table.right)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(table.title)}}}",
        rf"\label{{tab:{table.name}}}",
        r"\small",
        *([r"\resizebox{\linewidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(map(latex, titles)) + r" \\",
        r"\midrule",
    ]
    for line in table.lines:
        cells = [rf"\textbf{{{latex(cell.text)}}}" if cell.bold else latex(cell.text) or "-" for cell in line.cells]
        lines += [r"\midrule"] * line.breaks
        lines.append(" & ".join([*(latex(name) or "-" for name in line.names), *cells]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}" + "}" * wide]
    lines += ["", rf"\smallskip {latex(table.caption)}"] if table.caption else []
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return " ".join(text.split()).translate(_LATEX)
