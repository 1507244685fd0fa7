"""What can be done to a cache between forwards: crop, rows, reset, copies, devices; and what can be read from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import CacheStats, EvictionPolicy, LayerStats, PagedEvictionCache, ScoreContext
from same_state import same_state

BUDGET = 24


def make(**settings: Any) -> PagedEvictionCache:
    return models.paged(models.shared("llama").config, **{"budget": BUDGET, "block_size": 4, **settings})


def text(rows: int = 3, padded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [60, 51, 38][:rows] if padded else [60] * rows
    return models.left_pad(models.prompts(lengths, seed=2))


def feed(cache: Any, start: int, stop: int, rows: int = 3, padded: bool = True) -> torch.Tensor:
    return modes.forward(models.shared("llama"), cache, *text(rows, padded), start, stop)


def decode(cache: Any, start: int, stop: int, rows: int = 3, padded: bool = True) -> torch.Tensor:
    """One column at a time; logits [rows, columns, vocabulary]."""
    return torch.cat([feed(cache, at, at + 1, rows, padded) for at in range(start, stop)], dim=1)


# ---- crop ---------------------------------------------------------------------------------------------------------


class OldestInTheSecondLayer(EvictionPolicy):
    """The first layer keeps what is new, the second what is old."""

    def score(self, context: ScoreContext) -> torch.Tensor:
        return context.positions.float() * (1 if context.layer_idx == 0 else -1)


def test_a_refused_crop_changes_no_layer() -> None:
    cache = make(policy=OldestInTheSecondLayer())
    feed(cache, 0, 40, rows=1, padded=False)
    decode(cache, 40, 46, rows=1, padded=False)
    before = copy.deepcopy(cache)
    copy.deepcopy(cache).layers[0].crop(-12)  # alone, the first layer could
    with pytest.raises(ValueError, match=r"Cannot.*12"):
        cache.crop(-12)
    same_state(cache, before)


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_row_changes_of_an_empty_cache() -> None:
    cache = make()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    cache.crop(-1)
    assert cache.get_seq_length() == 0
    assert cache.layers[0].positions.numel() == 0


# ---- reset, copies, devices ---------------------------------------------------------------------------------------


def test_early_initialization() -> None:
    """Length-0 tensors announce dtype and device, then normal use."""
    cache, fresh = make(), make()
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert torch.equal(feed(cache, 0, 40), feed(fresh, 0, 40))
    same_state(cache, fresh)


@pytest.mark.parametrize("settings", [{}, {"bits": 4}], ids=str)
def test_rows_chosen_and_copies_made_in_inference_mode(settings: dict[str, Any]) -> None:
    """They go on outside of it, as those of any other cache."""
    model = models.shared("llama", "paged_eviction")
    cache = models.paged(model.config, budget=BUDGET, block_size=4, **settings)
    ids, mask = text()
    with torch.inference_mode():
        modes.forward(model, cache, ids, mask, 0, 40)
        chosen = copy.deepcopy(cache)
        chosen.reorder_cache(torch.tensor([0, 1, 2]))
        copied = copy.deepcopy(cache)
    fresh, *others = (
        torch.cat([modes.forward(model, one, ids, mask, at, at + 1) for at in range(40, 44)], dim=1)
        for one in (cache, chosen, copied)
    )
    assert all(torch.equal(fresh, other) for other in others)


# ---- the contract with transformers -------------------------------------------------------------------------------


def test_sizes_before_the_first_update() -> None:
    cache = make()
    assert cache.get_mask_sizes(9, 0) == (9, 0)
    assert cache.layers[0].get_mask_sizes(9) == (9, 0)
    assert cache.layers[0].get_mask_sizes(torch.arange(9)) == (9, 0)


def test_sizes_from_cache_positions() -> None:
    """Up to transformers 5.3 the argument is a tensor."""
    cache = make()
    feed(cache, 0, 40)
    for count in (1, 2, 7):
        assert cache.get_mask_sizes(torch.arange(40, 40 + count), 1) == cache.get_mask_sizes(count, 1)
    assert cache.get_mask_sizes(1, 0) == (BUDGET, 41 - BUDGET)
    assert cache.get_mask_sizes(3, 0) == (BUDGET + 3, 40 - BUDGET)


def test_length_is_unbounded() -> None:
    for layer in make().layers:
        assert layer.get_max_length() == -1
        assert not layer.is_compileable
        assert not layer.is_sliding


# ---- reading ------------------------------------------------------------------------------------------------------


def test_stats_add_up() -> None:
    cache = make()
    feed(cache, 0, 40)
    decode(cache, 40, 53)
    stats = cache.stats()
    assert isinstance(stats, CacheStats)
    assert all(isinstance(layer, LayerStats) for layer in stats.layers)
    assert (stats.seen, stats.largest_held, stats.budget) == (53, BUDGET, BUDGET)
    real = text()[1][:, :53].sum(1).tolist()
    held = (cache.layers[0].positions[:, 0] >= 0).sum(1).tolist()
    assert stats.evicted_tokens == 2 * (sum(real) - sum(held))
    assert [layer.evicted_tokens for layer in stats.layers] == [stats.evicted_tokens // 2] * 2
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    assert stats.storage_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert stats.storage_bytes == 2 * 2 * 3 * 2 * BUDGET * 8 * 4
    assert [layer.layer_idx for layer in stats.layers] == [0, 1]


def test_repr_is_for_people() -> None:
    cache = make()
    feed(cache, 0, 40)
    shown = repr(cache)
    words = ("PagedEvictionCache", "policy=keydiff", "allocator=uniform", "bits=None", "seen=40", "held=24,")
    for word in (*words, "shared", "KiB"):
        assert word in shown
    assert len(shown) < 400
    assert "40" in repr(cache.layers[0])
    model = models.shared("llama", "paged_eviction")
    listed = models.paged(model.config, budget=24, block_size=4, bits=4, allocator="heads:[[2], [1]]")
    modes.forward(model, listed, *text(), 0, 40)
    assert "allocator=heads" in repr(listed) and "bits=4" in repr(listed)
    assert "held=24.0 on average and 29 in the largest layer" in repr(listed)
    stats = listed.stats()
    assert (stats.mean_held, stats.largest_held, stats.budget) == (24.0, 29, 24)
    assert f"evicted={stats.evicted_tokens / 2 / len(text()[0]):g} tokens per layer and row" in repr(listed)
    assert "PagedEvictionCache" in repr(make())


def test_reading_an_empty_cache() -> None:
    cache = make()
    for read in (cache.block_table, cache.block_scores):
        with pytest.raises(RuntimeError, match="forward first"):
            read()
    assert cache.stats().seen == cache.stats().largest_held == cache.stats().evicted_tokens == 0


def test_reading_a_layer_that_is_not_paged() -> None:
    cache = models.paged(models.family_config("gemma3"), budget=48)
    with pytest.raises(ValueError, match=r"Paged.*\[1\]"):
        cache.block_table(0)
