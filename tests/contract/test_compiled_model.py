"""`torch.compile(model.forward)` and an ordinary cache: what the cache does stays outside of the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

#: Attention, lengths of the prompts, options; each compiles dozens of frames, for seconds.
WAYS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "filling, then binding": ("sdpa", [9, 6], {}),
    "few bits": ("sdpa", [24], {"bits": 4}),
    "observing, unequal": ("paged_eviction", [24, 17], {"policy": "h2o", "allocator": "heads:[[0.6, 1.4]]"}),
}


def two_turns(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    for turn in range(2):
        with torch.no_grad():
            ids = model.generate(
                ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False, pad_token_id=0
            )
        more = torch.full((ids.shape[0], 3), 5 + turn)
        ids = torch.cat([ids, more], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return ids


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "observing, unequal" else pytest.mark.all_cases) for way in WAYS]
)
def test_as_without_compilation(way: str) -> None:
    """A row alone, and a batch with pads on the left."""
    attention, lengths, settings = WAYS[way]
    model = models.build("llama", attention, num_hidden_layers=1)
    ids, mask = models.left_pad(models.prompts(lengths))

    plain, cache = (models.paged(model.config, **{"budget": 16, "block_size": 4, **settings}) for _ in range(2))
    expected = two_turns(model, plain, ids, mask)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert torch.equal(two_turns(model, cache, ids, mask), expected)
    finally:
        torch._dynamo.reset()
    assert cache.stats().evicted_tokens > 0
    for layer, own in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.positions, own.positions)


def test_a_whole_graph_needs_a_static_cache() -> None:
    """The error says so, where torch tells reasons."""
    model = models.shared("llama")
    cache = models.paged(model.config, budget=64)
    ids = torch.stack(models.prompts([20]))
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    try:
        with torch.no_grad(), pytest.raises(Exception, match="disable") as refused:
            forward(ids, **{CACHE_ARGUMENT: cache})
    finally:
        torch._dynamo.reset()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9):
        assert "fullgraph=True needs PagedEvictionCache(..., static=True)" in str(refused.value)
