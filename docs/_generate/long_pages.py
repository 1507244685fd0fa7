"""Long texts that are read in chunks and asked: the rows of `benchmarks/long_rows.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

from long_reader import FILE, read_rows
from long_tables import cells, tables
from memory_tables import MODELS

#: The cell of which the README has a sentence: model, length, tokens read at once; and its caches.
_CELL = ("smollm2", 2048, 512)
_SHOWN = (("prepared", "1/8"), ("keydiff", "1/4"))


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    return tuple(read_rows(FILE))


def long_rows(_: str) -> str:
    """A table for each model, length and way of reading."""
    return tables(_rows(), MODELS)


def front(_: str) -> str:
    """The sentence of the README."""
    rows = [row for row in cells(_rows())[_CELL] if row["kind"] == "one"]
    right = {}
    for name, share in (("full", ""), *_SHOWN):
        own = [row["right"] for row in rows if (row["cache"], row["share"]) == (name, share)]
        right[name] = f"{sum(own)} of {len(own)}"
    documents = len({row["document"] for row in rows})
    return (
        f"**Longer, read in chunks** of {_CELL[2]}: of single facts in {documents} documents of {_CELL[1]:,} tokens, "
        f"the full cache answers {right['full']}, an eighth of the memory after `prepare` {right['prepared']}, and "
        f"`keydiff` at a quarter {right['keydiff']} ([first rows](docs/real_models.md#long-texts-read-in-chunks))."
    )
