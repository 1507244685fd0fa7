"""Successive halving: how many candidates read how many passages.

All candidates read a passage or two; the half that diverges least reads more, and so on, until two have read many. Each
round costs about the same. Decisions follow from the rows alone, so that a search that was stopped goes on as it would
have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

#: The share of candidates that a round leaves. With a third, rare passages on which a candidate diverges far were met
#: too late: docs/recommend.md, "A tenth of the cost".
KEPT = 1 / 2
#: No round leaves fewer.
FEWEST = 2
#: Passages of the first round, the most that may be afforded: one alone says little.
FIRST = (2, 1)


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
    allowed = share * cost([Round(candidates, passages)])
    least = next((few for few in FIRST if few <= passages and cost([Round(candidates, few)]) <= allowed), 1)
    best = _rounds(candidates, passages, 1, allowed, least)
    for count in range(2, 12):
        rounds = _rounds(candidates, passages, count, allowed, least)
        longer = best[-1].passages < rounds[-1].passages and cost(rounds) <= allowed
        if not longer or rounds[-1].candidates == rounds[-2].candidates:
            break
        best = rounds
    return best


def cost(rounds: Sequence[Round]) -> int:
    """Readings of passages, those of the full cache among them."""
    before = total = 0
    for each in rounds:
        total += each.candidates * (each.passages - before)
        before = each.passages
    return total + before


def _rounds(candidates: int, passages: int, count: int, allowed: float, least: int) -> tuple[Round, ...]:
    """The longest of so many rounds that cost what is allowed, each about the same; the shortest if all cost more."""
    low, high = 0.0, float(passages)
    for _ in range(40):
        middle = (low + high) / 2
        fits = cost(_scaled(candidates, passages, count, middle, least)) <= allowed
        low, high = (middle, high) if fits else (low, middle)
    return _scaled(candidates, passages, count, low, least)


def _scaled(candidates: int, passages: int, count: int, first: float, least: int) -> tuple[Round, ...]:
    """Rounds whose first reads so many passages: half of the candidates reads twice as many, and so on."""
    found, total = [], 0.0
    for index in range(count):
        size = max(min(candidates, FEWEST), round(candidates * KEPT**index))
        total = min(float(passages), max(total + 1, least, total + first * candidates / size))
        found.append(Round(size, int(total + 1e-6)))
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
