"""Successive halving over caches: try all on a passage, and the better ones on more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ..learned.measured import BYTES, RANDOM, TOKENS, Measured, Row
from .candidates import Candidate
from .difference import NoDifferenceError, matters
from .effort import Effort
from .measuring import Trials
from .passages import Passage
from .progress import of_passage, of_reading
from .readings import Divergences, Reading, Readings

#: Shares of the tokens at which kinds of caches are compared.
SHARES = (1 / 4, 1 / 8)
#: Shares of the bytes in 16 bits at which the best is compared with the same in few bits.
MEMORY_SHARES = (1 / 4, 1 / 8, 1 / 16)

#: A cache that diverges this many times as much as another is clearly worse, even if few passages were read: their
#: order in one of them says little.
_CLEARLY = 2.0

#: Called with the work that was done, and with work that need not be done.
Report = Callable[[float], object]


class Search:
    """Finds the best caches of one model.

    Args:
        model: with the attention implementation "paged_eviction".
        profile: file with scores and shares.
        passages: the first half decides which caches are tried on the rest.
        effort: see there.
        use: the criterion.
        readings: what is known already.
        done, skipped: see `Report`.
    """

    def __init__(
        self,
        model: Any,
        profile: Path,
        passages: Sequence[Passage],
        effort: Effort,
        use: str,
        readings: Readings,
        done: Report,
        skipped: Report,
    ) -> None:
        self._model, self._profile, self._passages = model, profile, passages
        self._effort, self._use, self._readings = effort, use, readings
        self._done, self._skipped = done, skipped
        self._trials = cache(self._read_passage)
        self._counted: set[Reading] = set()  # of which the progress was reported
        self._random = Candidate(RANDOM)
        self._dtype = str(model.dtype).removeprefix("torch.")

    def run(self) -> Measured:
        """Measure caches, and return all rows.

        Raises:
            NoDifferenceError: see there.
        """
        effort, (first, rest) = self._effort, halves(len(self._passages))
        candidates, passages = effort.candidates, [*first, *rest]
        hopeful = self._race(candidates, SHARES[:1], first, effort.hopeless)
        stay = self._best(hopeful, SHARES[:1], first, effort.stay)
        self._measure(stay, SHARES[1:], first)
        stay = self._race(stay, SHARES, rest, _CLEARLY, first)
        best = self._best(stay, SHARES, passages, 1)
        if not best or not matters(*(self._rows([one], TOKENS, SHARES, passages) for one in (*best, self._random))):
            raise NoDifferenceError
        kinds = self._in_few_bits(best[0], stay, first)
        rows = [
            *self._rows([self._random, *candidates], TOKENS, SHARES, passages),
            *self._rows([self._random, *kinds], BYTES, MEMORY_SHARES, first),
        ]
        return Measured(tuple(rows), self._dtype)

    def _in_few_bits(self, best: Candidate, stay: Sequence[Candidate], passages: Sequence[int]) -> list[Candidate]:
        """Find the bits of the best cache, and compare the others in these: where bits are few, most tokens stay, and
        another cache may choose those better. Returns all that were tried."""
        kinds = [replace(best, bits=bits) for bits in self._effort.bits]
        self._race(kinds, MEMORY_SHARES, passages, _CLEARLY)
        found = self._best(kinds, MEMORY_SHARES, passages, 1)
        if not found:  # no bits suit this model
            self._measure([best], MEMORY_SHARES, passages)
            return [best]
        # All of them on all passages: one cache finds many facts, another one a single fact.
        others = [replace(one, bits=found[0].bits) for one in stay if one != best]
        self._measure(others, MEMORY_SHARES, passages)
        return [*kinds, *others]

    def _race(
        self,
        candidates: Sequence[Candidate],
        shares: Sequence[float],
        passages: Sequence[int],
        times: float,
        before: Sequence[int] = (),
    ) -> list[Candidate]:
        """Measure passage after passage, of which `before` are done, and leave out what is clearly worse by then."""
        left = list(candidates)
        for at in range(len(passages) + 1):
            if known := [*before, *passages[:at]]:
                close = self._close(left, shares, known, times)
                gone = [candidate for candidate in left if candidate not in close]
                self._skipped(len(shares) * sum(self._work(one, lost) for one in passages[at:] for lost in gone))
                left = close
            self._measure(left, shares, passages[at : at + 1])
        return left

    def _close(
        self, candidates: Sequence[Candidate], shares: Sequence[float], passages: Sequence[int], times: float
    ) -> list[Candidate]:
        """Those that diverge at most so many times as much as the best one."""
        scores = self._scores(candidates, shares, passages)
        limit = times * min(scores.values(), default=0.0)
        return [candidate for candidate in candidates if scores.get(_label(candidate), float("inf")) <= limit]

    def _best(
        self, candidates: Sequence[Candidate], shares: Sequence[float], passages: Sequence[int], count: int
    ) -> list[Candidate]:
        scores = self._scores(candidates, shares, passages)
        measured = [candidate for candidate in candidates if _label(candidate) in scores]
        return sorted(measured, key=lambda candidate: scores[_label(candidate)])[:count]

    def _scores(
        self, candidates: Sequence[Candidate], shares: Sequence[float], passages: Sequence[int]
    ) -> dict[str, float]:
        rows = self._rows([self._random, *candidates], TOKENS, shares, passages)
        return Measured(tuple(rows), self._dtype).scores(TOKENS, self._use)

    def _rows(
        self, candidates: Iterable[Candidate], unit: str, shares: Sequence[float], passages: Sequence[int]
    ) -> list[Row]:
        """Rows of what was measured in these passages."""
        rows = []
        for candidate in candidates:
            for share in shares:
                divergences: dict[str, list[float]] = {}
                for passage in passages:
                    known = self._readings.known(Reading(_label(candidate), share, passage))
                    for aspect, numbers in known.items():
                        divergences.setdefault(aspect, []).extend(numbers)
                if divergences:
                    rows.append(replace(candidate.row(unit, share), divergences=divergences))
        return rows

    def _measure(self, candidates: Sequence[Candidate], shares: Sequence[float], passages: Sequence[int]) -> None:
        """Measure these caches, and random eviction in the same passages."""
        for passage in passages:
            for share in shares:
                for candidate in (self._random, *candidates):
                    reading = Reading(_label(candidate), share, passage)
                    self._readings.get(reading, lambda c=candidate, r=reading: self._read(c, r))  # type: ignore[misc]
                    if reading not in self._counted:
                        self._counted.add(reading)
                        self._done(self._work(passage, candidate))

    def _read(self, candidate: Candidate, reading: Reading) -> Divergences:
        trials = self._trials(reading.passage)
        divergences: dict[str, list[float]] = {}
        try:
            for aspect, divergence in trials.divergences(
                lambda tokens: candidate.make(self._model.config, self._profile, reading.share, tokens, trials.token)
            ):
                divergences.setdefault(aspect, []).append(divergence)
        except ValueError:  # this model does not support it; the search goes on
            return None
        return {aspect: [fmean(numbers)] for aspect, numbers in divergences.items()}  # one fact counts as much as many

    def _work(self, passage: int, candidate: Candidate | None = None) -> float:
        return of_reading(self._passages[passage], candidate is not None and candidate.bits is not None)

    def _read_passage(self, index: int) -> Trials:
        trials = Trials(self._model, self._passages[index])
        self._done(of_passage(self._passages[index]))
        return trials


def halves(count: int) -> tuple[list[int], list[int]]:
    """The passages that decide which caches are tried on the others, and the others."""
    return list(range(count))[: (count + 1) // 2], list(range(count))[(count + 1) // 2 :]


def _label(candidate: Candidate) -> str:
    return candidate.row(TOKENS, 1).label
