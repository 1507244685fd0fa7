"""Successive halving over caches: try all on a few passages, and the better ones on more."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..learned.measured import BYTES, RANDOM, TOKENS, Measured, Row
from .candidates import Candidate, of_bytes, of_tokens
from .measuring import Trials

#: Sizes at which caches are compared.
SHARES = (1 / 4, 1 / 8)
#: Number of caches that stay after the first size, random eviction included. The best is also tried with few bits.
STAY = 5

#: Called after each measurement.
Tick = Callable[[], object]


class Search:
    """Finds the best caches of one model.

    Args:
        model: with the attention implementation "paged_eviction".
        profile: file with scores and shares.
        trials: passages; the first ones decide which caches are tried on the rest.
        tick: see `Tick`.
    """

    def __init__(self, model: Any, profile: Path, trials: Sequence[Trials], tick: Tick) -> None:
        self._model, self._profile, self._trials, self._tick = model, profile, trials, tick
        self._rows: dict[tuple[str, float, str], Row] = {}
        self._refused: set[Candidate] = set()

    def run(self, use: str) -> Measured:
        """Measure caches, and return all rows; `use` is the criterion for the next round."""
        first, rest = self._trials[:2], self._trials[2:]
        candidates = of_tokens()
        self._measure(candidates, TOKENS, SHARES[0], first)
        stay = self._best(candidates, TOKENS, use, STAY)
        self._measure(stay, TOKENS, SHARES[1], first)
        for share in SHARES:
            self._measure(stay, TOKENS, share, rest)
        small = of_bytes(self._best(stay, TOKENS, use, 2)[1])
        for share in SHARES:
            self._measure(small, BYTES, share, first)
        return Measured(tuple(self._rows.values()))

    def _best(self, candidates: Sequence[Candidate], unit: str, use: str, count: int) -> list[Candidate]:
        """Random eviction, and the best of the others."""
        scores = Measured(tuple(self._rows.values())).scores(unit, use)
        measured = [candidate for candidate in candidates if candidate.row(unit, 1).label in scores]
        return [
            Candidate(RANDOM),
            *sorted(measured, key=lambda candidate: scores[candidate.row(unit, 1).label])[: count - 1],
        ]

    def _measure(self, candidates: Sequence[Candidate], unit: str, share: float, trials: Sequence[Trials]) -> None:
        for candidate in candidates:
            for passage_trials in trials:
                if candidate not in self._refused:
                    self._read(candidate, unit, share, passage_trials)
                self._tick()

    def _read(self, candidate: Candidate, unit: str, share: float, trials: Trials) -> None:
        config, token_bytes = self._model.config, trials.token_bytes

        def make(tokens: int) -> Any:
            return candidate.make(config, self._profile, unit, share, tokens, token_bytes)

        row = candidate.row(unit, share)
        key = unit, share, row.label
        row = self._rows.get(key, row)
        divergences = {aspect: list(numbers) for aspect, numbers in row.divergences.items()}
        try:
            for aspect, divergence in trials.divergences(make):
                divergences.setdefault(aspect, []).append(divergence)
        except ValueError:  # this model does not support it; the search goes on
            self._refused.add(candidate)
            return
        self._rows[key] = replace(row, divergences=divergences)


def steps(trials: int) -> int:
    """Number of calls of `tick`."""
    first, rest = min(trials, 2), max(trials - 2, 0)
    tokens = (len(of_tokens()) + STAY) * first + len(SHARES) * STAY * rest
    return tokens + len(SHARES) * len(of_bytes(Candidate(""))) * first
