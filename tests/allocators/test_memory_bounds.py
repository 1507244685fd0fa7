"""Memory means bytes: a short text takes what it needs, and reading in chunks holds the budget and a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.store.tensors import byte_count
from policy_kinds import NAMES

BLOCK = 4
ALLOCATORS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "pyramid": {"allocator": "pyramid"},
    "cake": {"allocator": "cake(observed=8)"},
    "d2o": {"allocator": "d2o"},
    "ada_kv": {"allocator": "ada_kv", "heads": "separate"},
    "heads": {"allocator": "heads:[[0.2, 3], [0.5, 0.3]]"},
    "first_prompt": {"allocator": "first_prompt(distance=2)"},
}


def made(settings: dict[str, Any], budget: int) -> tuple[Any, PagedEvictionCache]:
    model = models.shared("llama", "paged_eviction")
    return model, PagedEvictionCache(model.config, budget, BLOCK, **{"policy": "keydiff", **settings})


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_short_text_takes_what_it_needs(name: str, bits: int | None) -> None:
    """At most what `DynamicCache` takes, and a block for each head."""
    model, cache = made({**ALLOCATORS[name], "bits": bits}, 256)
    ids, mask = models.left_pad(models.prompts([30]))
    modes.forward(model, cache, ids, mask, 0, 30)
    for step in range(30, 33):
        ids, mask = torch.cat([ids, ids[:, :1]], dim=1), modes.extend(mask, 1)
        modes.forward(model, cache, ids, mask, step, step + 1)
    keys = cache.paged_layers[0][1].store.read()[0]
    token = 2 * keys.shape[1] * keys.shape[3] * keys.element_size() * len(cache.paged_layers)
    assert cache.stats().storage_bytes <= token * (33 + 30 + BLOCK), "storage that grows at least doubles"
    fresh = made({**ALLOCATORS[name], "bits": bits}, 256)[1]
    modes.forward(model, fresh, ids[:, :30], mask[:, :30], 0, 30)
    assert fresh.stats().storage_bytes <= token * (30 + BLOCK)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("name", ["uniform", "heads", "first_prompt"])
def test_every_policy_takes_what_a_short_text_needs(name: str, policy: str) -> None:
    model, cache = made({**ALLOCATORS[name], "policy": policy}, 256)
    ids, mask = models.left_pad(models.prompts([30]))
    modes.forward(model, cache, ids, mask, 0, 30)
    held = cache.paged_layers[0][1].store.read()
    assert cache.stats().storage_bytes <= byte_count(*held) // held[0].shape[2] * (30 + BLOCK) * 2


@pytest.mark.parametrize("name", ALLOCATORS)
def test_reading_in_chunks_holds_the_budget_and_a_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On average over layers, whenever a layer has taken something in."""
    model, cache = made(ALLOCATORS[name], 64)
    layers, chunk, peak = [layer for _, layer in cache.paged_layers], 48, [0]
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    token = 2 * heads * width * 4

    def watched(layer: Any, update: Any) -> Any:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            result = update(*arguments, **more)
            waiting = sum(paged_layer.state.waiting for paged_layer in layers)
            stored = sum(paged_layer.store.columns.bytes for paged_layer in layers) // token
            peak[0] = max(peak[0], stored + waiting)
            return result

        return wrapped

    for layer in layers:
        monkeypatch.setattr(layer, "update", watched(layer, layer.update))
    ids, mask = models.left_pad(models.prompts([600], seed=4))
    for start in range(0, 600, chunk):
        modes.forward(model, cache, ids, mask, start, min(start + chunk, 600))
        for paged_layer in layers:
            paged_layer.commit()
        assert cache.stats().mean_held <= 64
        assert sum(paged_layer.store.columns.bytes for paged_layer in layers) // token <= 64 * len(layers)
    assert peak[0] <= (64 + chunk) * len(layers)


@pytest.mark.parametrize("allocator", ["uniform", "first_prompt(distance=2)"])
def test_a_share_of_the_first_chunk_is_warned_of_once(allocator: str) -> None:
    """With the number of tokens that a layer holds on average, whichever layer tells of it."""
    model, cache = made({"allocator": allocator}, "25%")  # type: ignore[arg-type]
    ids, mask = models.left_pad(models.prompts([96]))
    with pytest.warns(
        UserWarning, match=r"were 96: it is 24 tokens per layer.* 96 that come now, after 96\."
    ) as caught:
        for start in (0, 96, 192):
            modes.forward(model, cache, ids.repeat(1, 3), mask.repeat(1, 3), start, start + 96)
    assert len([one for one in caught if "first forward" in str(one.message)]) == 1
    assert cache.stats().storage_bytes == 24 * len(cache.layers) * byte_count(
        *(states[:, :, :1] for states in (cache.layers[0].keys, cache.layers[0].values))
    )


def test_a_question_after_the_text_is_no_surprise(recwarn: pytest.WarningsRecorder) -> None:
    """Less than half as long as the text."""
    model, cache = made({}, "25%")  # type: ignore[arg-type]
    ids, mask = models.left_pad(models.prompts([96]))
    ids, mask = ids.repeat(1, 2), mask.repeat(1, 2)
    for start, stop in ((0, 96), (96, 120), (120, 121), (121, 143)):
        modes.forward(model, cache, ids, mask, start, stop)
    assert not [one for one in recwarn if "first forward" in str(one.message)]
    with pytest.warns(UserWarning, match="first forward"):
        modes.forward(model, cache, ids, mask, 143, 145)
