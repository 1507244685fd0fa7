"""Rows are selected and repeated in all layers, those that evict nothing included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize(
    "change",
    [lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), lambda cache: cache.batch_repeat_interleave(2)],
    ids=["select", "repeat"],
)
def test_a_layer_that_has_met_nothing(change: Callable[[Any], None]) -> None:
    model = models.shared("qwen3_next")
    cache = PagedEvictionCache(model.config, budget=16, block_size=4)
    change(cache)
    assert cache.get_seq_length() == 0
    assert modes.run(model, cache, "greedy", *modes.batch("greedy", padded=False)).shape == (3, modes.STEPS)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
def test_rows_that_are_not_there_change_nothing(family: str) -> None:
    """No layer has other rows than the rest afterwards."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family)
    ids, mask = models.left_pad(models.prompts([30, 21, 26]))
    cache = PagedEvictionCache(model.config, budget=16, block_size=4)
    modes.forward(model, cache, ids, mask, 0, 26)
    for change in (
        lambda: cache.batch_select_indices(torch.tensor([0, 7])),
        lambda: cache.batch_select_indices(torch.tensor([True, False])),
        lambda: cache.reorder_cache(torch.tensor([3, 0, 0])),
        lambda: cache.batch_repeat_interleave(-1),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            change()
    straight = PagedEvictionCache(model.config, budget=16, block_size=4)
    modes.forward(model, straight, ids, mask, 0, 26)
    logits = [modes.forward(model, one, ids, mask, 26, 30) for one in (cache, straight)]
    assert torch.equal(*logits)
