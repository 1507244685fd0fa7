"""Rounds in which everything is timed once, so that the noise of a busy machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def interleaved(
    runs: Mapping[K, Callable[[], float]],
    rounds: int,
    failed: Callable[[K, Exception], None] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of every run in each round, as it tells them.

    Args:
        failed: told of a run that raised; it takes no part in later rounds and none in the result. None: nobody is,
            and the error is raised.
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
