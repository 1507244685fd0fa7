"""What a cache held is free as soon as nobody has the cache, without a search for circles: on a GPU that is memory."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

pytestmark = pytest.mark.contract
OURS = "paged_eviction"


@pytest.fixture(autouse=True)
def no_search_for_circles() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"static": True}),
        ("llama", {"policy": "h2o"}),
        ("llama", {"policy": "h2o", "static": True}),
        ("llama", {"policy": "snapkv", "allocator": "cake"}),
        ("llama", {"policy": "snapkv", "allocator": "ada_kv", "heads": "separate"}),
        ("llama", {"bits": 4}),
        ("llama", {"positions": "cache"}),
        ("llama", {"budget": "50%"}),
        ("llama", {"budget": "20kB"}),
    ],
    ids=str,
)
def test_storage_is_free_with_the_cache(family: str, settings: dict[str, Any]) -> None:
    model = models.shared(family, OURS)
    ids, mask = modes.batch("direct", padded=False)
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, **settings})
    with torch.no_grad():
        modes.forward(model, cache, ids, mask, 0, 20)
        for at in range(20, 30):
            modes.forward(model, cache, ids, mask, at, at + 1)
    held = [weakref.ref(states) for layer in cache.layers for states in (layer.keys, layer.values)]
    held += [weakref.ref(layer) for layer in cache.layers]
    del cache
    assert [reference() for reference in held] == [None] * len(held)
