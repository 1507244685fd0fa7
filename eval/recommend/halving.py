"""Successive halving: how many candidates read how many passages.

All candidates read a passage or two; those that diverge least read more, and so on, until a few have read many. Each
round costs about the same. Decisions follow from the rows alone, so that a search that was stopped goes on as it would
have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

#: The share of candidates that a round leaves.
KEPT = 1 / 3
#: No round leaves fewer.
FEWEST = 2


@dataclass(frozen=True)
class Round:
    """Some candidates, and how many passages each of them has read at its end."""

    candidates: int
    passages: int


def plan(candidates: int, passages: int, share: float) -> tuple[Round, ...]:
    """The rounds that cost at most `share` of reading everything, the readings of the full cache counted in both.

    If even one passage for every candidate is more than that, the rounds are those that cost least.

    Args:
        candidates: at least one.
        passages: at least one.
        share: above 0, up to 1.
    """
    allowed = share * (candidates + 1) * passages
    best: tuple[Round, ...] = ()
    for count in range(1, 12):
        rounds = _rounds(candidates, passages, count, allowed)
        if best and (cost(rounds) > allowed or _reach(rounds) <= _reach(best)):
            break
        best = rounds
        if rounds[-1].passages == passages and count == 1:
            break
        if rounds[-1].candidates <= FEWEST:
            break
    return best


def cost(rounds: Sequence[Round]) -> int:
    """Readings of passages, those of the full cache among them."""
    before = total = 0
    for each in rounds:
        total += each.candidates * (each.passages - before)
        before = each.passages
    return total + before


def _reach(rounds: Sequence[Round]) -> tuple[int, int]:
    return rounds[-1].passages, -rounds[-1].candidates


def _rounds(candidates: int, passages: int, count: int, allowed: float) -> tuple[Round, ...]:
    sizes = [max(min(candidates, FEWEST), round(candidates * KEPT**index)) for index in range(count)]
    weights = [candidates / size for size in sizes]
    unit = allowed / (sum(size * weight for size, weight in zip(sizes, weights, strict=True)) + sum(weights))
    found, total = [], 0
    for size, weight in zip(sizes, weights, strict=True):
        total = min(passages, max(total + 1, total + int(unit * weight)))
        found.append(Round(size, total))
    # What rounding left over goes to those that are left last.
    while found[-1].passages < passages:
        longer = [*found[:-1], Round(found[-1].candidates, found[-1].passages + 1)]
        if cost(longer) > allowed:
            break
        found = longer
    return tuple(found)


def survivors(divergences: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """The `count` candidates of the lowest mean, in the order of the mapping where means are equal.

    Args:
        divergences: of each candidate, on the same passages; not a number counts as infinite.
    """
    means = {name: mean(values) for name, values in divergences.items()}
    return sorted(means, key=lambda name: means[name])[:count]


def mean(values: Sequence[float]) -> float:
    """Infinite where a value is not a number, or there is none."""
    if not values or any(value != value for value in values):
        return inf
    return sum(values) / len(values)
