"""First tokens that stay as the policy was published, unless the user says how many."""

from pathlib import Path
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

SINKS = {
    "streaming_llm": 4,
    "streaming_llm(n_sink=6)": 6,
    "recency": 0,
    "keydiff": 2,
    "hybrid(streaming_llm, recency)": 4,
    "hybrid(streaming_llm, keydiff)": 2,
}


def filled(policy: str, **settings: Any) -> PagedEvictionCache:
    """Two rows, one of them padded, long after eviction began."""
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=12, block_size=2, policy=policy, **settings)
    ids, mask = models.left_pad(models.prompts([40, 23]))
    for start, stop in ((0, 30), *((at, at + 1) for at in range(30, 40))):
        modes.forward(model, cache, ids, mask, start, stop)
    return cache


def first_held(cache: PagedEvictionCache) -> list[set[int]]:
    """Of each row those of the first ten positions that are held."""
    return [set(range(10)) & set(row[0].tolist()) for row in cache.layers[0].positions]


@pytest.mark.parametrize("policy", SINKS)
def test_as_published(policy: str) -> None:
    cache = PagedEvictionCache(models.family_config("llama"), budget=32, block_size=2, policy=policy)
    assert {layer.budget.protected for layer in cache.layers} == {SINKS[policy]}


def test_the_user_wins() -> None:
    for policy in SINKS:
        cache = PagedEvictionCache(models.family_config("llama"), budget=32, block_size=2, policy=policy, sink_tokens=3)
        assert cache.layers[0].budget.protected == 3


def test_the_two_differ() -> None:
    assert first_held(filled("streaming_llm")) == [{0, 1, 2, 3}] * 2
    assert first_held(filled("recency")) == [set()] * 2
    assert first_held(filled("recency", sink_tokens=4)) == [{0, 1, 2, 3}] * 2


@pytest.mark.parametrize("policy", ["streaming_llm", "recency"])
def test_a_saved_file_keeps_what_it_was_made_with(policy: str, tmp_path: Path) -> None:
    path, config = tmp_path / "context.safetensors", models.family_config("llama")
    filled(policy).save(path)
    assert PagedEvictionCache.load(path, config).layers[0].budget.protected == SINKS[policy]
    own = filled(policy, sink_tokens=2)
    own.save(path)
    loaded = PagedEvictionCache.load(path, config)
    assert loaded.layers[0].budget.protected == 2
    assert torch.equal(loaded.layers[0].positions, own.layers[0].positions)
