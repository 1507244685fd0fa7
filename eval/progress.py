"""How far a run is, said by what computes to what shows it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """Rows finished, rows in all, what the last ones were about, and what unfinished ones have of a row together."""

    finished: int
    total: int
    last: str = ""
    begun: float = 0.0


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Reading:
    """How far rows are that take long.

    Attributes:
        keys: of the rows.
        done, total: tokens of each.
        label: what runs.
    """

    keys: tuple[tuple[Any, ...], ...]
    done: int
    total: int
    label: str


#: Takes what `tell` is told.
LISTENER: ContextVar[Callable[[Reading], None] | None] = ContextVar("LISTENER", default=None)


def tell(reading: Reading) -> None:
    """Say how far rows are, from inside a job."""
    if listener := LISTENER.get():
        listener(reading)
