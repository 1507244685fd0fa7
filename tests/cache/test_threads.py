"""One thread after another may use a cache, and several its copies."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

TEXT = torch.stack(models.prompts([60]))
SETTINGS: dict[str, dict[str, Any]] = {
    "keydiff": {"policy": "keydiff"},
    "recency": {"policy": "recency"},
    "roomy": {"budget": 80},
    "observing": {"policy": "h2o"},
    "sharing out": {"allocator": "pyramid"},
    "recording": {"record_past": True},
    "static": {"static": True},
    "few bits": {"bits": 4},
}


def make(model: Any, settings: dict[str, Any]) -> Any:
    return models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})


def forward(model: Any, cache: Any, start: int, stop: int) -> torch.Tensor:
    with torch.no_grad():
        return model(TEXT[:, start:stop], **{CACHE_ARGUMENT: cache}).logits


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_after_the_other_is_no_mistake(settings: dict[str, Any]) -> None:
    """Every forward in another thread, and its layers in two."""
    model = models.shared("llama", "paged_eviction")
    cache, alone = make(model, settings), make(model, settings)
    spans = [(0, 30), *((at, at + 1) for at in range(30, 50))]
    for span in spans:
        with ThreadPoolExecutor(1) as pool:
            logits = pool.submit(forward, model, cache, *span).result()
        assert torch.equal(logits, forward(model, alone, *span))


def test_a_copy_for_each_thread() -> None:
    model = models.shared("llama")
    prefix = make(model, {})
    forward(model, prefix, 0, 30)
    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(lambda cache: forward(model, cache, 30, 40), [copy.deepcopy(prefix) for _ in range(2)]))
    assert torch.equal(*logits)


def test_layers_in_threads_of_their_own() -> None:
    """As where a model is split into stages."""
    states = torch.randn(2, 1, 2, 40, 8)
    cache, alone = (make(models.shared("llama"), {}) for _ in range(2))
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for at in range(40):
            for layer, pool in enumerate((first, second)):
                new = states[layer][:, :, at : at + 1]
                updated = pool.submit(cache.update, new, new, layer).result()
                assert torch.equal(updated[0], alone.update(new, new, layer)[0])
