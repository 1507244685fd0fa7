"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], numbers: Sequence[bool], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines.

    Args:
        header, rows: cells as they are written.
        numbers: which columns stand on the right.
    """
    rule = "|" + "".join("---:|" if right else "---|" for right in numbers)
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [first, rule, *rest]
