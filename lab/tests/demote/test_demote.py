"""Demoting: losers are kept on in few bits, beside slots that stay as they came."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from slow_demote import DemoteRecorder, assert_two_tiers, demoted_positions
from torch import Tensor
from transformers import DynamicCache

import models
import modes
from closeness import assert_close
from hf_paged_eviction import make_disposal
from hf_paged_eviction_lab.demote import Demote, demoted_tokens

OURS = "paged_eviction"
SMALL: dict[str, Any] = {"budget": 16, "block_size": 4, "policy": "keydiff", "disposal": "demote"}
WAYS: dict[str, dict[str, Any]] = {
    "keys": {},
    "four_bits": {"disposal": "demote(bits=4, share=0.3)", "heads": "separate"},
    "eight_bits": {"disposal": "demote(bits=8, share=0.1)", "policy": "paged_eviction"},
    "observed": {"disposal": "demote(share=0.15)", "policy": "h2o", "heads": "separate"},
}


# ---- what attention sees ---------------------------------------------------------------------------------------------


#: Every way meets every second mode, full and padded by turns.
CASES = [
    (way, mode, (row + column) % 4 == 0)
    for row, way in enumerate(WAYS)
    for column, mode in enumerate(("beam", "chunked_prefill", "three_turns", "assisted"))
    if (row + column) % 2 == 0
]


@pytest.mark.parametrize(("way", "mode", "padded"), CASES)
def test_exact(way: str, mode: str, padded: bool) -> None:
    """Equal to a plain cache whose demoted tokens are rounded; none is in two places, the best ones stay."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{**SMALL, **WAYS[way]})
    with DemoteRecorder(model, cache) as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert_two_tiers(model, recorder)
    stats = cache.stats()
    assert demoted_tokens(cache) > 0
    assert (recorder.gone > 0) == (stats.evicted_tokens > demoted_tokens(cache))
    assert recorder.gone > 0 or way == "keys"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_families(family: str) -> None:
    """Soft-capping, sinks, windows beside."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    cache = models.paged(model.config, **SMALL)
    with DemoteRecorder(model, cache) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert_two_tiers(model, recorder)
    assert demoted_tokens(cache) > 0


def spans(length: int) -> list[tuple[int, int]]:
    return [(0, 20), *((at, at + 1) for at in range(20, 31)), (31, length)]


def logits(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    chunks = [modes.forward(model, cache, ids, mask, *span) for span in spans(ids.shape[1])]
    return torch.cat(chunks, dim=1)[mask.bool()]


def test_with_room_for_all_only_rounding_is_lost() -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", True)
    expected = logits(model, DynamicCache(config=model.config), ids, mask)
    errors = []
    for bits in (8, 4, 2):
        cache = models.paged(model.config, **{**SMALL, "disposal": Demote(bits, share=0.9)})
        errors.append((logits(model, cache, ids, mask) - expected).norm() / expected.norm())
        assert demoted_tokens(cache) == cache.stats().evicted_tokens > 0
    dropped = logits(model, models.paged(model.config, **{**SMALL, "disposal": "drop"}), ids, mask)
    assert errors[0] < 0.03
    assert errors[0] < errors[1] / 4 < errors[2] / 8 < (dropped - expected).norm() / expected.norm() / 8


def test_a_row_that_comes_in_chunks() -> None:
    """What a row's first tokens show does not depend on the chunk in which they come."""
    model = models.shared("llama", OURS)
    texts = models.prompts([40, 12], seed=2)
    ids, mask = models.left_pad(texts)
    cache, alone = (models.paged(model.config, **{**SMALL, "budget": 12}) for _ in "ab")
    for span in ((0, 20), (20, 40)):  # the second row comes in the second chunk alone
        modes.forward(model, cache, ids, mask, *span)
    modes.forward(model, alone, texts[1][None], torch.ones(1, 12, dtype=torch.long), 0, 12)
    for (_, layer), (_, own) in zip(cache.paged_layers, alone.paged_layers, strict=True):
        assert torch.allclose(layer.action.state.channels[1], own.action.state.channels[0])


# ---- bytes -----------------------------------------------------------------------------------------------------------


def tensors_of(layer: Any) -> int:
    held = (layer.keys, layer.values, *vars(layer.action.state).values())
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_both_tiers_are_within_one_number_of_bytes(share: float) -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", True)
    cache = models.paged(model.config, **{**SMALL, "disposal": Demote(2, share)})
    logits(model, cache, ids, mask)
    stats = cache.stats()
    assert stats.storage_bytes + stats.summary_bytes == sum(tensors_of(layer) for _, layer in cache.paged_layers)
    most = stats.storage_bytes / (1 - share)
    one = stats.summary_bytes / len(cache.paged_layers) / cache.paged_layers[0][1].action.places
    assert most - 2 * len(cache.paged_layers) * one <= stats.storage_bytes + stats.summary_bytes <= most


def test_memory_covers_both() -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", True)
    memory = 60_000
    cache = models.paged(model.config, budget=f"{memory}B", block_size=4, policy="keydiff", disposal="demote")
    plain = models.paged(model.config, budget=f"{memory}B", block_size=4, policy="keydiff")
    for one in (cache, plain):
        logits(model, one, ids, mask)
    stats = cache.stats()
    assert 0.8 * memory <= stats.storage_bytes + stats.summary_bytes <= memory
    assert cache.budget is not None and plain.budget is not None
    assert cache.budget < plain.budget < cache.budget + cache.layers[0].action.places


def test_no_room() -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{**SMALL, "disposal": "demote(share=0.01)"})
    with pytest.raises(ValueError, match=r"16.*precision"):
        modes.forward(model, cache, *modes.batch("direct", False), 0, 5)


# ---- what else happens to a cache ------------------------------------------------------------------------------------


def everything(cache: Any) -> list[Any]:
    return [(layer.positions.tolist(), demoted_positions(layer)) for _, layer in cache.paged_layers]


def fed(model: Any, **settings: Any) -> tuple[Any, Tensor, Tensor]:
    ids, mask = modes.batch("direct", True)
    cache = models.paged(model.config, **{**SMALL, **settings})
    for span in ((0, 30), *((at, at + 1) for at in range(30, 37))):
        modes.forward(model, cache, ids, mask, *span)
    return cache, ids, mask


def test_shrinking_makes_places_fewer() -> None:
    model = models.shared("llama", OURS)
    cache, ids, mask = fed(model, budget=24, disposal="demote(share=0.2)")
    before, places = everything(cache), cache.layers[0].action.places
    cache.shrink(12)
    stats = cache.stats()
    assert cache.layers[0].action.places < places
    assert stats.summary_bytes <= stats.storage_bytes * 0.2 / 0.8
    for (held, demoted), (held_before, demoted_before) in zip(everything(cache), before, strict=True):
        for row in range(len(held)):
            allowed = set(held_before[row][0]) | demoted_before[row][0]
            assert (set(held[row][0]) | demoted[row][0]) <= allowed
            if row < 2:  # the third has no more tokens than fit
                assert demoted[row][0] - demoted_before[row][0], "what had to leave its slot was not demoted"
    modes.forward(model, cache, ids, mask, 37, 40)


def test_taking_back() -> None:
    """Tokens that wait leave no trace; others only while they are held."""
    model = models.shared("llama", OURS)
    cache, ids, mask = fed(model, record_past=True)
    cache.crop(0)
    before = everything(cache)
    modes.forward(model, cache, ids, mask, 37, 40)
    cache.crop(-3)
    assert everything(cache) == before
    again = [modes.forward(model, one, ids, mask, 37, 40) for one in (cache, copy.deepcopy(cache))]
    cache.crop(-3)
    assert torch.equal(again[0][mask[:, 37:].bool()].isfinite(), torch.ones_like(again[0]).bool()[mask[:, 37:].bool()])
    plain, ids, mask = fed(model)
    before = everything(plain)
    plain.crop(-2)
    for (held, demoted), (_, demoted_before) in zip(everything(plain), before, strict=True):
        assert demoted == demoted_before
        assert not any(set(held[row][0]) & demoted[row][0] - {-1} for row in range(len(held)))


def test_rows_and_resets() -> None:
    model = models.shared("llama", OURS)
    cache, ids, mask = fed(model)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    order = torch.tensor([2, 2, 0, 0])
    other, _, _ = fed(model)
    logits_of_rows, own = (
        torch.cat([modes.forward(model, reordered, *text, at, at + 1) for at in range(37, 40)], 1)
        for reordered, text in ((cache, (ids[order], mask[order])), (other, (ids, mask)))
    )
    assert_close(logits_of_rows, own[order])
    cache.reset()
    assert demoted_tokens(cache) == cache.stats().summary_bytes == 0


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_refused() -> None:
    ours = models.shared("llama", OURS)
    for options, message in [
        ({"disposal": "demote", "positions": "cache"}, "positions='cache'"),
        ({"disposal": "demote", "allocator": "pyramid"}, "an allocator"),
        ({"disposal": "demote", "allocator": "pyramid"}, "an allocator"),
        ({"disposal": "demote(bits=5)"}, "bits must be one of"),
        ({"disposal": "demote(share=1)"}, "share must lie"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.paged(ours.config, **{"budget": 24, "block_size": 4, **options})
    disposal = make_disposal("demote(bits=4, share=0.25)")
    assert disposal == Demote(4, 0.25)
    assert disposal.label == "demote(bits=4, share=0.25)"
