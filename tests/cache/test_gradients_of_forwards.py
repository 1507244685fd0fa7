"""Gradients over several forwards are refused, not wrong; without `backward` nothing is."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from closeness import assert_close
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

TEXT, MASK = models.left_pad(models.prompts([40, 33], seed=1))
WAYS: list[dict[str, Any]] = [
    {},
    {"record_past": True},
    {"bits": 8},
    {"bits": 4, "static": True},
    {"positions": "cache"},
    {"policy": "h2o"},
]


def forward(model: Any, cache: Any, start: int, stop: int) -> torch.Tensor:
    where = models.positions_of(MASK)[:, start:stop]
    return model(
        TEXT[:, start:stop], attention_mask=MASK[:, :stop], position_ids=where, **{CACHE_ARGUMENT: cache}
    ).logits


@pytest.mark.parametrize("spans", [[(0, 20), (20, 40)], [(0, 20), (20, 21), (21, 22)]], ids=["chunks", "steps"])
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_over_several_forwards(settings: dict[str, Any], spans: list[tuple[int, int]]) -> None:
    model = models.build("llama", "paged_eviction")
    sizes: dict[str, Any] = {"budget": 64, "block_size": 4, "policy": "keydiff", **settings}
    cache, quiet = models.paged(model.config, **sizes), models.paged(model.config, **sizes)
    logits = [forward(model, cache, *span) for span in spans]
    with torch.no_grad():
        for chunk, span in zip(logits, spans, strict=True):
            again = forward(model, quiet, *span)  # without gradients codes are read where they lie
            assert_close(chunk, again) if "bits" in settings else torch.testing.assert_close(
                chunk, again, rtol=0, atol=0
            )
    with pytest.raises(RuntimeError, match=r"Gradients|inplace"):
        sum(part[:, -1].sum() for part in logits).backward()
    cache.reset()  # nothing of it is left
    forward(model, cache, 0, 20)[:, -1].sum().backward()


@pytest.mark.parametrize("settings", [{}, {"record_past": True}, {"policy": "h2o"}], ids=str)
def test_after_a_text_that_was_read_without(settings: dict[str, Any]) -> None:
    model, gradients = models.build("llama", "paged_eviction"), []
    sizes: dict[str, Any] = {"budget": 64, "block_size": 4, "policy": "keydiff", **settings}
    for cache in (models.paged(model.config, **sizes), DynamicCache(config=model.config)):
        model.zero_grad()
        with torch.no_grad():
            forward(model, cache, 0, 20)
        forward(model, cache, 20, 40)[:, -1].sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_few_bits_after_a_text_that_was_read_without() -> None:
    """What is held is a constant then, rounded or not."""
    model = models.build("llama", "paged_eviction")
    cache = models.paged(model.config, budget=64, block_size=4, bits=8)
    with torch.no_grad():
        forward(model, cache, 0, 20)
    forward(model, cache, 20, 40).sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())
