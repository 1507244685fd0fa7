"""A cache that takes in a recording holds, and goes on as, one that read the text itself."""

from typing import Any

import pytest
import torch

import models
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.preparing.recording import Recording

SETTINGS: dict[str, dict[str, Any]] = {
    "keys": {"policy": "keydiff"},
    "queries": {"policy": "h2o", "heads": "separate"},
    "window": {"policy": "snapkv(window=4)"},
    "heads": {"policy": "tova", "allocator": "heads:[[0.4, 1.8], [1.2, 0.6]]"},
    "first prompt": {"policy": "keydiff", "allocator": "first_prompt(distance=2)"},
    "bits": {"policy": "keydiff", "bits": 4},
}


@pytest.mark.parametrize("split", [None, 31], ids=["at once", "in two parts"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_as_reading(family: str, settings: dict[str, Any], split: int | None) -> None:
    model = models.shared(family, "paged_eviction")
    if family == "gemma3" and settings.get("allocator", "").startswith("heads"):
        settings = {**settings, "allocator": "first_prompt(distance=2, threshold=0.05)"}
    ids = models.prompts([60])[0][None]
    with torch.no_grad():
        read = Recording(model, ids[:, :split])
        whole = read if split is None else Recording(model, ids[:, split:], read)
        played, own = (PagedEvictionCache(model.config, 24, 4, **settings) for _ in "ab")
        whole.play(played)
        feed(model, ids, None, own)
        for (_, ours), (_, expected_layer) in zip(played.paged_layers, own.paged_layers, strict=True):
            assert torch.equal(ours.positions, expected_layer.positions)
        more = models.prompts([5], seed=2)[0][None]
        logits, expected = (feed(model, more, None, cache, keep=0) for cache in (played, own))
    assert_close(logits[0], expected[0])
    assert played.stats() == own.stats()
    assert whole.layers is not None


def test_layers_with_a_state_of_their_own_read_the_text() -> None:
    model = models.shared("falcon_h1", "paged_eviction")
    ids = models.prompts([40])[0][None]
    with torch.no_grad():
        read = Recording(model, ids)
        assert read.layers is None
        played, own = (PagedEvictionCache(model.config, 24, 4, policy="keydiff") for _ in "ab")
        read.play(played)
        feed(model, ids, None, own)
    assert played.get_seq_length() == own.get_seq_length() == 40
    assert torch.equal(played.paged_layers[0][1].positions, own.paged_layers[0][1].positions)
