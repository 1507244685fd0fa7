"""What the README's picture shows: a column of the table of real models."""

from __future__ import annotations

from dataclasses import dataclass

import memory_tables as kept

#: The model that anybody can fetch, and which has all lines.
MODEL = "smollm2"
#: Kinds of caches, and the shares of memory that the picture shows of each.
_SHOWN = (
    ("prepared", (1 / 2, 1 / 4, 1 / 8, 1 / 16)),
    ("without", (1 / 4, 1 / 8, 1 / 16)),
    ("paged_eviction", (1 / 4,)),
    ("random", (1 / 4,)),
)


@dataclass(frozen=True)
class Line:
    """A bar of the picture.

    Attributes:
        cache: its name.
        share: of the memory of 16-bit keys and values.
        right: right answers about one fact that is asked for after compression, in percent.
    """

    cache: str
    share: str
    right: int


def lines() -> list[Line]:
    """All caches but the full one."""
    frame = kept.rows(MODEL)
    found = []
    for name, shares in _SHOWN:
        for share in shares:
            right = kept.right(kept.asked(kept.group_of(frame, name, share), "later", False))
            found.append(Line(kept.CACHES[name], kept.SHARES[share], int(right.partition(" ")[0])))
    return found
