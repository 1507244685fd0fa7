"""What holds for every option of a cache holds for disposals of the lab, too."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

OURS = "paged_eviction"
DISPOSALS = ["merge", "merge(values_only=True)", "demote"]


def cache_of(disposal: str, **options: Any) -> PagedEvictionCache:
    config = models.shared("llama", OURS).config
    return PagedEvictionCache(
        config, **{"budget": 16, "block_size": 4, "policy": "recency", **options}, disposal=disposal
    )


@pytest.mark.parametrize("disposal", DISPOSALS)
def test_a_model_in_bfloat16(disposal: str) -> None:
    model = models.build("llama", OURS)
    cache = cache_of(disposal)
    inputs = modes.batch("greedy", padded=True)
    modes.run(model, cache, "greedy", *inputs)
    model.to(torch.bfloat16)
    cache.reset()
    logits = [modes.run(model, one, "greedy", *inputs) for one in (cache, cache_of(disposal))]
    assert torch.equal(*logits)
    assert cache.paged_layers[0][1].dtype == torch.bfloat16


@pytest.mark.parametrize("disposal", DISPOSALS)
def test_a_pickled_cache_goes_on(disposal: str) -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([46, 30, 39]))
    cache = cache_of(disposal)
    for start, stop in ((0, 24), (24, 25), (25, 26)):
        modes.forward(model, cache, ids, mask, start, stop)
    twin = pickle.loads(pickle.dumps(cache))
    for at in range(26, 36):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits), at


@pytest.mark.parametrize("disposal", DISPOSALS)
def test_storage_is_free_with_the_cache(disposal: str) -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", padded=False)
    cache = cache_of(disposal)
    with torch.no_grad():
        modes.forward(model, cache, ids, mask, 0, 20)
        modes.forward(model, cache, ids, mask, 20, 21)
    held = [weakref.ref(states) for layer in cache.layers for states in (layer.keys, layer.values)]
    held += [weakref.ref(layer) for layer in cache.layers]
    del cache
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.parametrize("disposal", DISPOSALS)
def test_bits_are_refused(disposal: str) -> None:
    with pytest.raises(ValueError, match="bits="):
        cache_of(disposal, bits=4)
