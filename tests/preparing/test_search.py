"""Which caches the search of `prepare` finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged_eviction.learned.measured import RANDOM, Measured, Row
from hf_paged_eviction.options.defaults import of_profile
from hf_paged_eviction.preparing.candidates import Candidate
from hf_paged_eviction.preparing.effort import NORMAL, Effort
from hf_paged_eviction.preparing.passages import Passage
from hf_paged_eviction.preparing.readings import Reading, Readings
from hf_paged_eviction.preparing.search import Search


def test_the_third_of_the_first_half_may_be_the_best_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Gemma-3-270M: the halves are small, and facts differ."""
    best = NORMAL.candidates[4]

    def divergences(self: Any, candidate: Any, reading: Reading) -> dict[str, list[float]]:
        if candidate == Candidate(RANDOM):
            return {"unknown": [9.0, 9.1]}
        of_tokens = replace(candidate, bits=None)
        if of_tokens == best and reading.passage >= 2:
            return {"unknown": [0.1, 0.2]}
        place = 1.5 if of_tokens == best else NORMAL.candidates.index(of_tokens)
        return {"unknown": [1 + place / 100, 1 + place / 100]}

    measured = _searched(NORMAL, divergences, tmp_path, monkeypatch)
    found = measured.best("tokens", "both")
    assert found is not None and (found.policy, found.allocator) == (best.policy, best.allocator)


def _searched(effort: Effort, divergences: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What a search finds if these are the divergences."""
    monkeypatch.setattr(Search, "_read", divergences)
    passage = Passage(torch.ones(1, 8, dtype=torch.long), None, (torch.ones(1, 2, dtype=torch.long),))
    model, readings = SimpleNamespace(dtype=torch.float32), Readings(folder / "readings.jsonl", {})
    subject = model, folder, [passage] * 4, effort, "both", readings
    return Search(*subject, lambda work: None, lambda work: None).run()  # type: ignore[arg-type]


def test_another_cache_may_be_the_best_in_few_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Gemma-3-270M: of a quarter of the tokens none keeps enough; of those that fit in few bits, one does."""
    first, second = NORMAL.candidates[:2]
    worse = dict(zip(NORMAL.bits, (3.0, 1.0, 1.25), strict=True))
    read: list[Reading] = []

    def divergences(self: Any, candidate: Any, reading: Reading) -> dict[str, list[float]]:
        read.append(reading)
        if candidate.policy == RANDOM:
            return {"unknown": [1.0]}
        place = NORMAL.candidates.index(replace(candidate, bits=None))
        if candidate.bits is None:
            return {"unknown": [0.8 + place / 100]}
        return {"unknown": [(0.1 if place == 1 else 0.2) * worse[candidate.bits]]}

    measured = _searched(NORMAL, divergences, tmp_path, monkeypatch)
    of_tokens, of_bytes = measured.best("tokens", "both"), measured.best("bytes", "both")
    assert of_tokens is not None and of_bytes is not None
    assert of_tokens.label == first.row("tokens", 1).label
    assert of_bytes.label == replace(second, bits=(4, 2)).row("bytes", 1).label
    # Bits that are clearly worse in the first passage are not tried in the second.
    in_bits = [reading for reading in read if reading.cache.startswith(first.row("bytes", 1).label + ",")]
    kept = {replace(first, bits=bits).row("bytes", 1).label for bits in NORMAL.bits[1:]}
    assert {reading.cache for reading in in_bits if reading.passage} == kept


def test_who_finds_a_single_fact_may_lose_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Gemma-3-270M: in few bits caches are compared on all passages, since these ask for different things."""
    second = NORMAL.candidates[1]

    def divergences(self: Any, candidate: Any, reading: Reading) -> dict[str, list[float]]:
        if candidate.policy == RANDOM:
            return {"unknown": [1.0]}
        place = NORMAL.candidates.index(replace(candidate, bits=None))
        if candidate.bits is None:
            return {"unknown": [0.8 + place / 100]}
        return {"unknown": [(0.04, 0.3)[reading.passage] if place != 1 else (0.14, 0.06)[reading.passage]]}

    best = _searched(NORMAL, divergences, tmp_path, monkeypatch).best("bytes", "both")
    assert best is not None and best.label == replace(second, bits=NORMAL.bits[0]).row("bytes", 1).label


@pytest.mark.parametrize(("least", "best"), [(0.5, "tova"), (0.2, "snapkv")])
def test_sizes_beyond_reach_do_not_decide(least: float, best: str) -> None:
    """At a sixteenth the second cache is far better, but not good enough to be of use, or it is."""
    rows = [
        Row(policy, "uniform", 4, "bytes", share, {"unknown": [divergence]})
        for policy, divergences in (("tova", (0.1, 0.9)), ("snapkv", (0.2, least)))
        for share, divergence in zip((1 / 8, 1 / 16), divergences, strict=True)
    ]
    random = [Row(RANDOM, "uniform", None, "bytes", share, {"unknown": [1.0]}) for share in (1 / 8, 1 / 16)]
    found = Measured((*random, *rows), "float32").best("bytes", "both")
    assert found is not None and found.policy == best
    alone = Measured((random[1], *(row for row in rows if row.share == 1 / 16)), "float32").best("bytes", "both")
    assert alone is not None and alone.policy == "snapkv"  # where nothing else was measured


def test_the_parts_of_a_hybrid_read_the_profile() -> None:
    row = Candidate("hybrid(keydiff, observed, weights=(1, 2))").row("tokens", 1 / 4)
    default = of_profile(row, "a b")
    assert (default.policy, default.allocator, default.profile) == (row.policy, "uniform", "a b")
