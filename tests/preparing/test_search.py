"""Which caches the search of `prepare` finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged_eviction.learned.measured import RANDOM
from hf_paged_eviction.preparing.candidates import Candidate
from hf_paged_eviction.preparing.effort import NORMAL, THOROUGH, Effort
from hf_paged_eviction.preparing.passages import Passage
from hf_paged_eviction.preparing.readings import Reading, Readings
from hf_paged_eviction.preparing.search import Search


@pytest.mark.parametrize("effort", [NORMAL, THOROUGH])
def test_the_third_of_the_first_half_may_be_the_best_of_all(
    effort: Effort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Gemma-3-270M: the halves are small, and facts differ."""
    best = effort.candidates[4]

    def divergences(self: Any, candidate: Any, reading: Reading) -> dict[str, list[float]]:
        if candidate == Candidate(RANDOM):
            return {"unknown": [9.0, 9.1]}
        of_tokens = replace(candidate, bits=None)
        if of_tokens == best and reading.passage >= 2:
            return {"unknown": [0.1, 0.2]}
        place = 1.5 if of_tokens == best else effort.candidates.index(of_tokens)
        return {"unknown": [1 + place / 100, 1 + place / 100]}

    monkeypatch.setattr(Search, "_read", divergences)
    passage = Passage(torch.ones(1, 8, dtype=torch.long), None, (torch.ones(1, 2, dtype=torch.long),))
    model, readings = SimpleNamespace(dtype=torch.float32), Readings(tmp_path / "readings.jsonl", {})
    measured = Search(
        model, tmp_path, [passage] * 4, effort, "both", readings, lambda work: None, lambda work: None
    ).run()
    found = measured.best("tokens", "both")
    assert found is not None and (found.policy, found.allocator) == (best.policy, best.allocator)
