"""After `reset` the model may have another type."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"static": True}], ids=str)
def test_a_model_in_bfloat16(settings: dict[str, Any]) -> None:
    model = models.build("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="keydiff", **settings)
    inputs = modes.batch("greedy", padded=True)
    modes.run(model, cache, "greedy", *inputs)
    model.to(torch.bfloat16)
    cache.reset()
    fresh = PagedEvictionCache(model.config, budget=16, block_size=4, policy="keydiff", **settings)
    sequences = [modes.run(model, one, "greedy", *inputs) for one in (cache, fresh)]
    assert torch.equal(*sequences)
    assert cache.paged_layers[0][1].dtype == torch.bfloat16
