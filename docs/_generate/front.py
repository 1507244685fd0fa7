"""What the README shows: the lines of its table, of which its picture shows one column."""

from __future__ import annotations

from dataclasses import dataclass

import memory_tables as kept
from writing import table

#: The model that anybody can fetch, and which has all lines.
MODEL = "smollm2"
#: Kinds of caches, and the shares of memory that the README shows of each.
_SHOWN = (
    ("prepared", (1 / 2, 1 / 4, 1 / 8, 1 / 16)),
    ("without", (1 / 4, 1 / 8, 1 / 16)),
    ("paged_eviction", (1 / 4,)),
    ("random", (1 / 4,)),
)
#: Columns of right answers, as `memory_tables` asks for them.
_ASKED = {
    "one fact, asked after compression: right, %": ("later", False),
    "asked in the prompt": ("before", False),
}


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        cache: its name.
        share: of the memory of 16-bit keys and values.
        cells: nats that running text loses, and right answers of each column.
    """

    cache: str
    share: str
    cells: tuple[str, ...]

    @property
    def right(self) -> int:
        """Right answers about one fact that is asked for after compression, in percent."""
        return int(self.cells[1].partition(" ")[0])


def lines() -> list[Line]:
    """All lines but that of the full cache."""
    frame = kept.rows(MODEL)
    found = []
    for name, shares in _SHOWN:
        for share in shares:
            group = frame[(frame["cache"] == name) & (frame["share"] == share)]
            right = (kept.right(kept.asked(group, *question)) for question in _ASKED.values())
            found.append(Line(kept.CACHES[name], kept.SHARES[share], (kept.lost(frame, group), *right)))
    return found


def front(_: str) -> str:
    """The table of the README."""
    header = ("cache", "memory", "running text: nats lost", *_ASKED)
    body = [["full cache", "1", "0", *("100" for _ in _ASKED)]]
    body += [[line.cache, line.share, *line.cells] for line in lines()]
    return table(header, body)
