"""Small pieces of MyST."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """A table whose columns from `numbers_from` on stand on the right."""
    rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(_line(cells) for cells in (header, rule, *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def autoclass(path: str) -> str:
    """The documentation of a class, from its docstring."""
    return f"```{{eval-rst}}\n.. autoclass:: {path}\n```"


def paper_link(paper: str | None, prefix: str = "arXiv ") -> str:
    """An arXiv id as a link; "none" where there is none."""
    return f"[{prefix}{paper}](https://arxiv.org/abs/{paper})" if paper else "none"
