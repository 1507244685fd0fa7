"""Follow a chain of assignments (variable tracking, RULER, arXiv 2404.06654)."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query, first_line
from .words import Words

_HOPS = (2, 3)
_CHAINS = 3


class VariableTracking(NeedleTask):
    name = "variable_tracking"
    description = "Trace a variable through two or three assignments to its number; two other chains distract."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        chains = max(1, min(_CHAINS, load // 2))
        hops = rng.choice(_HOPS if load > 2 else (1,))
        # First digits differ, so that the first digit already says which chain was followed.
        tens, ones = rng.sample("123456789", chains), rng.sample("123456789", chains)
        numbers = [a + b for a, b in zip(tens, ones, strict=True)]
        names = [words.take(hops + 1) for _ in range(chains)]
        needles, homes = _interleave(rng, [_lines(n, v) for n, v in zip(names, numbers, strict=True)])
        queries = [_query(n, v, home) for n, v, home in zip(names, numbers, homes, strict=True)]
        rng.shuffle(queries)
        return Facts(tuple(needles), tuple(queries))

    def score(self, sample: Sample, prediction: str) -> float:
        """The last number on the first line: a chain may be written out before it."""
        found = re.findall(r"\d+", first_line(prediction))
        return float(bool(found) and found[-1] == sample.answers[0])


def _lines(names: list[str], number: str) -> list[str]:
    """A chain of assignments, first the number, then each variable from the one before."""
    values = [number, *names]
    return [f"let {name} = {value}" for name, value in zip(names, values[:-1], strict=True)]


def _query(names: list[str], number: str, home: tuple[int, ...]) -> Query:
    last, *rest = reversed(names)
    completion = "".join(f" {value} =" for value in rest) + f" {number}"
    return Query(f"Trace {last} back to its number. let {last} =", completion, number, home, {"hops": len(rest)})


def _interleave(rng: random.Random, chains: list[list[str]]) -> tuple[list[str], list[tuple[int, ...]]]:
    """All lines in one list, each chain in its own order, and where each chain went."""
    owners = [owner for owner, chain in enumerate(chains) for _ in chain]
    rng.shuffle(owners)
    supply = [iter(chain) for chain in chains]
    homes = [tuple(place for place, who in enumerate(owners) if who == owner) for owner in range(len(chains))]
    return [next(supply[owner]) for owner in owners], homes
