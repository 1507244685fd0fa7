"""The rows of a run, what tells them apart, and rounds in which everything is timed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ..store.results import Row

#: What became of a row: numbers, or an error.
MEASURED, FAILED = "measured", "failed"
K = TypeVar("K", bound=Hashable)


class BenchKey(NamedTuple):
    """The identity of a row; a run that is continued skips the rows it finds.

    Attributes:
        context: tokens before the step; None for variants to which it makes no difference.
    """

    variant: str
    context: int | None
    budget: int
    batch_size: int


def row_key(row: Row) -> BenchKey:
    """The identity of a finished row."""
    return BenchKey(*(row[name] for name in BenchKey._fields))


def make_row(key: BenchKey, status: str, why: str | None = None, **numbers: Any) -> Row:
    """A row with its numbers, or with the reason why it has none."""
    return {**key._asdict(), "status": status, "reason": why, **numbers}


def interleaved(
    runs: Mapping[K, Callable[[], float]],
    rounds: int,
    failed: Callable[[K, Exception], None] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of every run in each round. In a round each runs once, so that the noise of a busy machine hits all
    alike.

    Args:
        failed: called with a run that raised, which is left out of later rounds and of the result. None: the error is
            raised.
        tick: called after every run.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in times:
                try:
                    times[name].append(run())
                except Exception as error:
                    if failed is None:
                        raise
                    del times[name]
                    failed(name, error)
            tick()
    return times


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median over rounds of one time divided by the other of the same round."""
    return median(a / b for a, b in zip(of, to, strict=True))
