"""What can be done to a cache between forwards: crop, rows, reset, copies, devices; and what can be read from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
import modes
from closeness import assert_close
from hf_paged_eviction import CacheStats, EvictionPolicy, LayerStats, PagedEvictionCache, ScoreContext
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from reference import Recorder, assert_exact
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


def pick(cache: Any, index: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Go on with other rows of the same text."""
    ids, mask = (tensor[index] for tensor in text())
    model = models.shared("llama")
    steps = [modes.forward(model, cache, ids, mask, at, at + 1) for at in range(start, stop)]
    return torch.cat(steps, dim=1)


# ---- crop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", [-5, 15, 0, -20, 20])
def test_crop_before_any_eviction(argument: int) -> None:
    """Relative and absolute, as transformers calls it now and did before."""
    cache, fresh = make(), make()
    feed(cache, 0, 20)
    cache.crop(argument)
    kept = 20 if argument in (0, 20) else 15 if argument in (-5, 15) else 0
    assert cache.get_seq_length() == kept
    if kept:
        feed(fresh, 0, kept)
    a, b = feed(cache, kept, 40), feed(fresh, kept, 40)
    assert_close(a[0], b[0])
    assert_close(decode(cache, 40, 60), decode(fresh, 40, 60))


@pytest.mark.parametrize("start", [20, 24, 30, 33])
@pytest.mark.parametrize("drop", [1, 3, 6])
def test_crop_while_recording_leaves_no_trace(start: int, drop: int) -> None:
    """Rejected tokens never happened: the same as if the forward had been shorter."""
    cache, fresh = make(), make()
    for one in (cache, fresh):
        feed(one, 0, 12)
        decode(one, 12, start)
    cache.activate_past_recording()
    feed(cache, start, start + 6)
    cache.crop(-drop)
    if drop < 6:
        feed(fresh, start, start + 6 - drop)
    same_state(cache, fresh)
    cache.layers[0].record_past = cache.layers[1].record_past = False
    there = start + 6 - drop
    assert_close(decode(cache, there, 60), decode(fresh, there, 60))


def test_crop_of_zero_commits() -> None:
    cache, fresh = make(record_past=True), make()
    for one in (cache, fresh):
        feed(one, 0, 40)
    assert cache.layers[0].held == 0
    cache.crop(0)
    same_state(cache, fresh)


def test_next_forward_commits_too() -> None:
    cache = make(record_past=True)
    feed(cache, 0, 40)
    feed(cache, 40, 41)
    assert cache.layers[0].held == BUDGET
    assert cache.get_seq_length() == 41


def test_what_was_evicted_cannot_be_taken_back() -> None:
    cache = make()
    feed(cache, 0, 40)
    decode(cache, 40, 50)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-30)


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


@pytest.mark.parametrize("rows", ["select", "reorder", "repeat"])
@pytest.mark.parametrize("count", [2, 8, 14])
def test_crop_after_a_change_of_rows(rows: str, count: int) -> None:
    """The pads of a row go where the row goes: 22 columns hold 0, 9 and 22 pads."""
    cache, expected = make(), make()
    feed(cache, 0, 23)
    feed(expected, 0, 23 - count)
    index = {"select": [2], "reorder": [2, 0, 1], "repeat": [0, 0, 1, 1, 2, 2]}[rows]
    if rows == "select":
        cache.batch_select_indices(torch.tensor(index))
    elif rows == "reorder":
        cache.reorder_cache(torch.tensor(index))
    else:
        cache.batch_repeat_interleave(2)
    cache.crop(-count)
    expected.batch_select_indices(torch.tensor(index))
    same_state(cache, expected)
    assert cache.stats().evicted_tokens == 0
    ours, theirs = (pick(one, torch.tensor(index), 23 - count, 50) for one in (cache, expected))
    told = text()[1][index, 23 - count : 50].bool()
    assert_close(ours[told], theirs[told])
    same_state(cache, expected)


# ---- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [20, 24, 31, 40])
@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 1], [0, 2, 2]], ids=str)
def test_reorder(stop: int, index: list[int]) -> None:
    """While growing, just full and in the middle of a block: every row goes on as it would have."""
    cache, straight = make(heads="separate"), make(heads="separate")
    for one in (cache, straight):
        feed(one, 0, 16)
        decode(one, 16, stop)
    cache.reorder_cache(torch.tensor(index))
    ours = pick(cache, torch.tensor(index), stop, 60)
    theirs = decode(straight, stop, 60)[index]
    assert_close(ours, theirs)
    assert torch.equal(cache.layers[1].positions, straight.layers[1].positions[index])


@pytest.mark.parametrize("index", [[2], [0, 2], [1, 0, 2, 1]], ids=str)
def test_select(index: list[int]) -> None:
    cache, straight = make(), make()
    for one in (cache, straight):
        feed(one, 0, 30)
        decode(one, 30, 35)
    cache.batch_select_indices(torch.tensor(index))
    ours = pick(cache, torch.tensor(index), 35, 60)
    assert_close(ours, decode(straight, 35, 60)[index])


def test_select_by_mask() -> None:
    cache, straight = make(), make()
    for one in (cache, straight):
        feed(one, 0, 30)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.layers[0].positions, straight.layers[0].positions[[0, 2]])


def test_repeat_interleave() -> None:
    cache, straight = make(), make()
    for one in (cache, straight):
        feed(one, 0, 30)
    cache.batch_repeat_interleave(2)
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    assert_close(pick(cache, index, 30, 60), decode(straight, 30, 60)[index])


@pytest.mark.parametrize("index", [[2, 0, 1], [2], [1, 1, 0, 2]], ids=str)
def test_rows_with_a_given_mask(index: list[int]) -> None:
    """attention_mask= belongs to the rows it was given for, and follows them."""
    _, mask = text()
    given, learned = make(attention_mask=mask[:, :30]), make()
    for one in (given, learned):
        feed(one, 0, 30)
        one.batch_select_indices(torch.tensor(index))
    ours, theirs = (pick(one, torch.tensor(index), 30, 60) for one in (given, learned))
    assert torch.equal(ours, theirs)
    same_state(given, learned)


def test_row_changes_of_an_empty_cache() -> None:
    cache = make()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    cache.crop(-1)
    assert cache.get_seq_length() == 0
    assert cache.layers[0].positions.numel() == 0


def test_row_changes_while_tokens_wait() -> None:
    cache, straight = make(record_past=True), make(record_past=True)
    for one in (cache, straight):
        feed(one, 0, 30)
        feed(one, 30, 34)
    index = torch.tensor([2, 0])
    cache.batch_select_indices(index)
    for one in (cache, straight):
        one.crop(-2)
    assert torch.equal(cache.layers[0].positions, straight.layers[0].positions[index])
    assert torch.equal(cache.layers[0].keys, straight.layers[0].keys[index])


# ---- reset, copies, devices ---------------------------------------------------------------------------------------


def test_reset_keeps_the_storage() -> None:
    cache, fresh = make(), make()
    feed(cache, 0, 50)
    pointers = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats().largest_held == 0
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    ours, theirs = feed(cache, 0, 40), feed(fresh, 0, 40)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == pointers
    assert torch.equal(ours, theirs)
    assert torch.equal(decode(cache, 40, 60), decode(fresh, 40, 60))
    same_state(cache, fresh)


def test_reset_serves_another_batch_size() -> None:
    cache, fresh = make(), make()
    feed(cache, 0, 50)
    cache.reset()
    for one in (cache, fresh):
        feed(one, 0, 40, rows=1)
    same_state(cache, fresh)
    assert cache.layers[0].keys.shape[0] == 1


def test_reset_forgets_the_given_mask() -> None:
    _, mask = text()
    cache = make(attention_mask=mask[:, :40])
    feed(cache, 0, 40)
    cache.reset()
    feed(cache, 0, 40, padded=False)
    assert (cache.layers[0].positions >= 0).all()


def test_a_copy_goes_on_by_itself() -> None:
    cache = make()
    feed(cache, 0, 40)
    twin = copy.deepcopy(cache)
    before = twin.layers[0].keys.clone()
    ours = decode(cache, 40, 52)
    assert torch.equal(twin.layers[0].keys, before), "the copy shares nothing"
    assert twin.get_seq_length() == 40
    assert torch.equal(ours, decode(twin, 40, 52))
    same_state(cache, twin)


def test_early_initialization() -> None:
    """Length-0 tensors announce dtype and device, then normal use."""
    cache, fresh = make(), make()
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert torch.equal(feed(cache, 0, 40), feed(fresh, 0, 40))
    same_state(cache, fresh)


def test_offload_and_prefetch_on_one_device() -> None:
    cache, fresh = make(), make()
    for one in (cache, fresh):
        feed(one, 0, 40)
    for layer in cache.layers:
        layer.offload()
        assert layer.keys.device.type == "cpu"
        layer.prefetch()
    assert torch.equal(decode(cache, 40, 50), decode(fresh, 40, 50))


def test_in_and_out_of_inference_mode() -> None:
    """Storage made inside inference mode is written to outside of it."""
    cache, fresh = make(), make()
    with torch.inference_mode():
        feed(cache, 0, 40)
    feed(fresh, 0, 40)
    decode(cache, 40, 44)
    with torch.inference_mode():
        decode(cache, 44, 48)
    decode(fresh, 40, 48)
    same_state(cache, fresh)


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"policy": "keydiff", "disposal": "recall(blocks=1)"}], ids=str)
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
        torch.cat([modes.forward(model, each, ids, mask, at, at + 1) for at in range(40, 44)], dim=1)
        for each in (cache, chosen, copied)
    )
    assert all(torch.equal(fresh, other) for other in others)


def test_gradients_flow_through_the_first_forward() -> None:
    model = models.build("llama")
    ids, mask = text()
    logits = model(ids, attention_mask=mask, **{CACHE_ARGUMENT: make()}, use_cache=True).logits
    logits.sum().backward()
    with_cache = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    model(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    torch.testing.assert_close(with_cache, model.model.layers[0].self_attn.k_proj.weight.grad)


@pytest.mark.parametrize("budget", [32, 64])
def test_gradients_flow_through_later_forwards_as_far_as_their_own_tokens(budget: int) -> None:
    """As if what is held had been read without gradients; room is left, or the forward overflows."""
    model = models.build("llama")
    ids, mask = text()
    found = []
    for cache in (make(budget=budget), DynamicCache(config=model.config)):
        model.zero_grad()
        with torch.no_grad():
            model(ids[:, :20], attention_mask=mask[:, :20], **{CACHE_ARGUMENT: cache})
        model(ids[:, 20:40], attention_mask=mask[:, :40], **{CACHE_ARGUMENT: cache}).logits.sum().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert found[1].abs().max() > 0
    torch.testing.assert_close(*found)


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
        assert layer.get_max_length() == layer.get_max_cache_shape() == -1
        assert not layer.is_compileable
        assert not layer.is_sliding


def test_seq_length_counts_what_was_seen() -> None:
    cache = make(record_past=True)
    feed(cache, 0, 40)
    assert cache.get_seq_length() == 40
    cache.crop(-4)
    assert cache.get_seq_length() == 36
    decode(cache, 36, 50)
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [50, 50]
    cache.reset()
    assert cache.get_seq_length() == 0


def test_key_and_value_widths_may_differ() -> None:
    cache = make()
    keys, values = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 5)
    for index in range(2):
        returned = cache.update(keys, values, index)
        assert [states.shape[-1] for states in returned] == [8, 5]
        assert cache.layers[index].keys.shape == (1, 2, BUDGET, 8)
        assert cache.layers[index].values.shape == (1, 2, BUDGET, 5)


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


def test_evicted_blocks_count_victims() -> None:
    """One row without pads: a block begins to be overwritten every fourth token."""
    cache = make()
    feed(cache, 0, BUDGET, rows=1)
    assert cache.stats().evicted_blocks == 0
    for steps, blocks in [(1, 1), (3, 1), (1, 2), (7, 3)]:
        start = cache.get_seq_length()
        decode(cache, start, start + steps, rows=1)
        assert [layer.evicted_blocks for layer in cache.stats().layers] == [blocks, blocks]


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
    listed = models.paged(model.config, budget=[32, 16], block_size=4, bits=4)
    modes.forward(model, listed, *text(), 0, 40)
    assert "allocator=given" in repr(listed) and "bits=4" in repr(listed)
    assert "held=24.0 on average and 32 at most" in repr(listed)
    assert (listed.stats().mean_held, listed.stats().largest_held) == (24.0, 32)
    assert "PagedEvictionCache" in repr(make())
    assert "budget=24 tokens on average in blocks of 4" in repr(
        models.paged(models.shared("llama", "paged_eviction").config, budget=[32, 16], block_size=4)
    )


def test_block_table_and_scores() -> None:
    cache = make(policy="value_norm", heads="shared")
    feed(cache, 0, 40)
    table, scores = cache.block_table(1), cache.block_scores(1)
    assert table.shape == (3, 2, 6, 4)
    assert scores.shape == (3, 2, 6)
    layer = cache.layers[1]
    for row in range(3):
        norms = {}
        for slot, position in enumerate(layer.positions[row, 0].tolist()):
            norms[position] = layer.values[row, :, slot].norm(dim=-1).mean().item()
        for block, positions in enumerate(table[row, 0].tolist()):
            if -1 in positions:
                assert scores[row, 0, block].isnan()
            else:
                expected = sum(norms[position] for position in positions) / 4
                assert scores[row, 0, block].item() == pytest.approx(expected, rel=1e-5)


def test_reading_changes_nothing() -> None:
    quiet, watched = make(policy="keydiff"), make(policy="keydiff")
    feed(quiet, 0, 30)
    feed(watched, 0, 30)
    for at in range(30, 60):
        a = feed(quiet, at, at + 1)
        repr(watched), watched.stats(), watched.block_table(), watched.block_scores(1)
        b = feed(watched, at, at + 1)
        assert torch.equal(a, b)
    same_state(quiet, watched)


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


def test_crop_and_go_on_is_exact() -> None:
    """Speculative verification by hand: draft, reject, go on, with eviction all along."""
    model = models.shared("llama")
    ids, mask = text()
    cache = make(record_past=True)
    with Recorder(model, cache, poison=True) as recorder:
        at = 0
        for size, rejected in [(30, 0), (5, 2), (6, 5), (1, 0), (1, 0), (7, 7), (4, 1), (1, 0), (9, 0), (2, 1)]:
            modes.forward(model, cache, ids, mask, at, at + size)
            cache.crop(-rejected)
            at += size - rejected
    assert len(recorder.columns) == at
    assert_exact(model, recorder)
