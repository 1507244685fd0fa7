"""A cache that gives no right gradient refuses to give one; a forward alone asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("settings", [{"bits": 8}, {"record_past": True}], ids=str)
@pytest.mark.parametrize("lengths", [(12, 8), (12, 1)])
def test_several_forwards(settings: dict[str, Any], lengths: tuple[int, int], pads: int) -> None:
    model = models.build("llama")
    ids = torch.stack(models.prompts([20, 20]))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, attention_mask=mask, **settings)
    first, second = lengths
    model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache).logits.sum().backward()
    both = ids[:, first : first + second], mask[:, : first + second]
    said = model(both[0], attention_mask=both[1], past_key_values=cache).logits
    assert said.isfinite().all()
    with pytest.raises(RuntimeError, match="Gradients do not reach the tokens"):
        said.sum().backward()


def test_a_prompt_that_is_read_without_gradients() -> None:
    """What is held is a constant then, as it is said to be."""
    model = models.build("llama")
    ids = torch.stack(models.prompts([20, 20]))
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, bits=8)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
    model(ids[:, 12:], past_key_values=cache).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())
