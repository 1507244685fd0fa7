"""Arguments by their names of before: they work until 0.2, and say what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.lab.low_rank import LowRank
from hf_paged_eviction.options.arguments import OLD_NAMES
from hf_paged_eviction.table.budget import BlockBudget


def made(**given: Any) -> PagedEvictionCache:
    return PagedEvictionCache(models.family_config("llama"), **given)


def warned(name: str, instead: str, **given: Any) -> PagedEvictionCache:
    with pytest.warns(DeprecationWarning, match=rf"^{name}= goes in 0\.2: write .*{instead}") as caught:
        found = made(**given)
    assert [each.filename for each in caught] == [__file__], "the warning is about the line that says so"
    return found


@pytest.mark.parametrize(
    ("old", "new", "instead"),
    [
        ({"keep_ratio": 0.07}, {"budget": "7%"}, "budget='25%'"),
        ({"keep_ratio": 1}, {"budget": "100%"}, "budget='25%'"),
        ({"memory": "2GiB"}, {"budget": "2GiB"}, "budget='2GiB'"),
        ({"memory": 40_000}, {"budget": "40000B"}, "budget='2GiB'"),
        ({"protected_prefix": 20, "budget": 64}, {"sink_tokens": 20, "budget": 64}, "sink_tokens="),
        ({"protected_prefix": 3, "budget": 64}, {"budget": 64}, "sink_tokens="),
        ({"protected_prefix": 3, "budget": 64, "sink_tokens": 5}, {"budget": 64, "sink_tokens": 5}, "sink_tokens="),
        (
            {"protected_prefix": 3, "budget": 64, "policy": "streaming_llm"},
            {"budget": 64, "policy": "streaming_llm"},
            "sink_tokens=",
        ),
        (
            {"protected_prefix": 3, "budget": 64, "policy": "recency"},
            {"budget": 64, "policy": "recency", "sink_tokens": 3},
            "sink_tokens=",
        ),
    ],
    ids=str,
)
def test_sizes(old: dict[str, Any], new: dict[str, Any], instead: str) -> None:
    expected: BlockBudget = made(**new)._options.sizes
    assert warned(next(iter(old)), instead, **old)._options.sizes == expected


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"keep_ratio": 1.5}, ValueError, "keep_ratio must lie in"),
        ({"keep_ratio": float("nan")}, ValueError, "keep_ratio must lie in"),
        ({"keep_ratio": "half"}, TypeError, "keep_ratio must be a number"),
        ({"keep_ratio": 0.5, "budget": 64}, ValueError, "budget= and keep_ratio= both say"),
        ({"keep_ratio": 0.5, "memory": "1MiB"}, ValueError, "budget= and memory= both say"),
        ({"memory": 2.0}, TypeError, "int of bytes or a text"),
        ({"memory": 0}, ValueError, "at least one byte"),
        ({"memory": None}, ValueError, "budget= says how much is held"),
        ({"budget": 64, "protected_prefix": -2}, ValueError, "protected_prefix"),
        ({"budget": 64, "protected_prefix": "a"}, TypeError, "protected_prefix"),
        ({"budget": 64, "rank": 4}, ValueError, "needs basis="),
        ({"budget": 64, "basis": "file"}, ValueError, "give rank= too"),
        ({"budget": 64, "rank": 4, "basis": "nowhere"}, ValueError, "there is no such file"),
        ({"budget": 64, "record_past": 1}, TypeError, "record_past must be True or False"),
    ],
    ids=str,
)
def test_what_could_not_be_cannot_be(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(kind, match=words):
        made(**given)


def test_recording() -> None:
    assert warned("record_past", r"cache\.activate_past_recording", budget=64, record_past=True).layers[0].record_past
    assert not warned("record_past", "once", budget=64, record_past=False).layers[0].record_past


def test_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is handed on; what it does is tested with the lab."""
    seen: list[Any] = []
    monkeypatch.setattr(LowRank, "__post_init__", lambda self: seen.append((self.file, self.rank, self.bits)))
    monkeypatch.setattr(LowRank, "rounding", (None, None))
    monkeypatch.setattr(LowRank, "check_model", lambda self, config: None)
    monkeypatch.setattr(LowRank, "codecs", lambda self, index, plain, share: plain)
    with pytest.warns(DeprecationWarning, match=r"low_rank:FILE\(rank=64\)"):
        made(budget=64, rank=(4, None), basis="some.safetensors", bits=8)
    assert seen == [("some.safetensors", (4, None), 8)]


def test_all_of_them_are_here() -> None:
    assert {"keep_ratio", "memory", "protected_prefix", "rank", "basis", "record_past"} == OLD_NAMES
