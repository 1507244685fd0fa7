"""`torch.compile(model.forward)` and an ordinary cache: what the cache does stays outside of the graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "roomy": ("sdpa", {"budget": 80}),
    "binding": ("sdpa", {}),
    "few bits": ("sdpa", {"bits": 4}),
    "observing": ("paged_eviction", {"policy": "h2o"}),
    "unequal": ("paged_eviction", {"allocator": "pyramid"}),
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


@pytest.mark.each_value_once
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_as_without_compilation(way: str, rows: int) -> None:
    """A row alone, and a batch with pads on the left."""
    attention, settings = WAYS[way]
    model = copy.deepcopy(models.shared("llama", attention))
    ids, mask = models.left_pad(models.prompts([24, 17][:rows]))

    def make() -> Any:
        return models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})

    expected = two_turns(model, make(), ids, mask)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert torch.equal(two_turns(model, make(), ids, mask), expected)
    finally:
        torch._dynamo.reset()


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
