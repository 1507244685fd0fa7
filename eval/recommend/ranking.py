"""What was found: candidates by divergence, those that nothing beats, and what finding out cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import median, stdev
from typing import Any

from ..caches.budgets import FULL
from ..store.results import Row
from .halving import mean
from .search import decides

#: Step times, and bytes, that are nearer than this share are not told apart: they are no reason to lead further away.
SAME = 0.05


@dataclass(frozen=True)
class Found:
    """A candidate at a size, over the passages that it has read.

    Attributes:
        divergence: in nats per token, as if it had read all that the best one of its size has: its own mean over the
            mean of the best on the same passages, times the mean of the best.
        reading, answering: means over its own passages.
        passages: how many it has read.
        bytes: most that keys, values and what is kept beside them took on the device.
        finalist: never dropped.
        error: standard error of the divergence, over its passages; None where it has read one alone.
        tied: not seen to be worse than the best of its size: over the passages that both have read, the mean of the
            differences is at most twice its standard error.
    """

    size: str
    candidate: str
    divergence: float
    reading: float
    answering: float
    passages: int
    held: int
    bytes: int
    host_bytes: int
    step_ms: float
    finalist: bool
    error: float | None = None
    tied: bool = False


@dataclass(frozen=True)
class Cost:
    """What the search read, and what all candidates on all passages would have.

    Attributes:
        tokens: fed to the model, those of the full cache too.
        all_tokens: the same for the full grid.
        seconds: of all forwards.
    """

    tokens: int
    all_tokens: int
    seconds: float

    @property
    def share(self) -> float:
        return self.tokens / self.all_tokens if self.all_tokens else 1.0


def rank(rows: Mapping[Any, Row], left: Mapping[str, Sequence[str]], by: str) -> list[Found]:
    """All candidates that could be read, by size, the best first."""
    found: list[Found] = []
    for size, finalists in left.items():
        mine: dict[str, dict[str, Row]] = {}
        for row in rows.values():
            if row["size"] == size:
                mine.setdefault(row["candidate"], {})[row["passage"]] = row
        fine = {name: read for name, read in mine.items() if not any(row["failed"] for row in read.values())}
        best = next((name for name in finalists if name in fine), None)
        if best is None:
            continue
        whole = mean([decides(row, by) for row in fine[best].values()])
        for name, read in fine.items():
            own = mean([decides(row, by) for row in read.values()])
            same = mean([decides(fine[best][passage], by) for passage in read if passage in fine[best]])
            scale = whole / same if 0 < same < float("inf") else 1.0
            one = _found(size, name, own * scale, list(read.values()), name in finalists)
            deviation = _error([decides(row, by) for row in read.values()])
            pairs = [decides(read[each], by) - decides(fine[best][each], by) for each in read if each in fine[best]]
            found.append(replace(one, error=deviation, tied=name == best or _tied(pairs)))
    order = {size: index for index, size in enumerate(left)}
    return sorted(found, key=lambda each: (order[each.size], not each.finalist, each.divergence))


def _error(values: Sequence[float]) -> float | None:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 and all(map(isfinite, values)) else None


def _tied(differences: Sequence[float]) -> bool:
    error = _error(differences)
    return error is not None and mean(differences) <= 2 * error


def _found(size: str, name: str, divergence: float, rows: list[Row], finalist: bool) -> Found:
    return Found(
        size=size,
        candidate=name,
        divergence=divergence,
        reading=mean([row["reading"] for row in rows]),
        answering=mean([row["answering"] for row in rows]),
        passages=len(rows),
        held=min(row["held"] for row in rows),
        bytes=max(row["bytes"] for row in rows),
        host_bytes=max(row["host_bytes"] for row in rows),
        step_ms=_step(rows),
        finalist=finalist,
    )


def _step(rows: Sequence[Row]) -> float:
    """Median of the passages that were read alone."""
    alone = [row["step_ms"] for row in rows if row["step_ms"] is not None]
    return median(alone) if alone else 0.0


def front(found: Iterable[Found]) -> list[Found]:
    """Those that no other beats in divergence, bytes and step time at once."""
    every = list(found)
    return [each for each in every if not any(_beats(other, each) for other in every)]


def _beats(other: Found, one: Found) -> bool:
    """As near to the full cache and no more costly, and better in one of the three."""
    costs = [(other.bytes, one.bytes), (other.step_ms, one.step_ms)]
    if other.divergence > one.divergence or any(_less(mine, its) for its, mine in costs):
        return False
    return other.divergence < one.divergence or any(_less(its, mine) for its, mine in costs)


def _less(one: float, other: float) -> bool:
    return one < other * (1 - SAME)


def full_cache(rows: Mapping[Any, Row]) -> tuple[int, float]:
    """Bytes and milliseconds of a step of the full cache: the most, and the median."""
    read = [row for row in rows.values() if row["candidate"] == FULL]
    return max(row["bytes"] for row in read), _step(read)


def cost(rows: Iterable[Row], entries: int, passages: Sequence[int]) -> Cost:
    """What these rows took.

    Args:
        entries: candidates that could be read, at all sizes.
        passages: tokens of each.
    """
    read = [row for row in rows if not row["failed"]]
    return Cost(
        tokens=sum(row["tokens"] + row["again"] for row in read),
        all_tokens=(entries + 1) * sum(passages),
        seconds=sum(row["seconds"] for row in read),
    )
