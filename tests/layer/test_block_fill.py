"""Tokens written to slots that were worked out ahead: as if each of them had been decided on by itself."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.layer.single import BlockFill

SIZES: dict[str, Any] = {"budget": 24, "block_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "shared": {"policy": "paged_eviction", "heads": "shared"},
    "separate": {"policy": "keydiff", "heads": "separate"},
    "queries": {"policy": "snapkv(window=4)", "heads": "separate"},
    "positions": {"policy": "keydiff", "positions": "cache"},
    "unequal": {"policy": "keydiff", "heads": "separate", "allocator": Heads.of([[1.25, 0.75], [0.75, 1.25]])},
    "ada_kv": {"policy": "snapkv(window=4)", "heads": "separate", "allocator": "ada_kv"},
    "few bits, room left": {  # behind the prompt, in heads of more than 30 tokens
        "policy": "keydiff",
        "heads": "separate",
        "allocator": Heads.of([[1.5, 0.5], [0.75, 1.25]]),
        "bits": 4,
    },
    "blocks ahead": {"policy": "lazy_eviction(lag=8)"},
    "blocks of one": {"policy": "keydiff", "block_size": 1},
}


def _swap(cache: PagedEvictionCache) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def _repeat(cache: PagedEvictionCache) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))  # as before


def _there_and_back(cache: PagedEvictionCache) -> None:
    for _, layer in cache.paged_layers:
        layer.offload()
        layer.prefetch()


EVENTS: dict[str, Callable[[PagedEvictionCache], None]] = {
    "swap": _swap,
    "repeat": _repeat,
    "there and back": _there_and_back,
    "shrink": lambda cache: cache.shrink(16),
    "protect": lambda cache: cache.protect([(28, 30)]),
    "record": lambda cache: cache.activate_past_recording(),
    "nothing": lambda cache: None,
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_as_if_decided_one_by_one(
    setting: str, event: str, padded: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """An event in the middle of a block, a copy, a pad among single tokens, several tokens: bit for bit the same."""
    model = models.shared("llama", "paged_eviction")
    settings = {**SIZES, **SETTINGS[setting]}
    if event == "shrink" and setting in ("unequal", "ada_kv", "few bits, room left"):
        settings["budget"] = 32
    quick, slow = (PagedEvictionCache(model.config, **settings) for _ in range(2))
    for _, layer in slow.paged_layers:
        layer.state.may_fill = False
    written = 0
    write = BlockFill.write

    def count(fill: BlockFill, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        nonlocal written
        attended = write(fill, *states)
        written += attended is not None
        return attended

    monkeypatch.setattr(BlockFill, "write", count)
    torch.manual_seed(0)
    mask = torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[0, :13] = 0
    counts = [30, *[1] * 9, 3, *[1] * 14]
    for step, new in enumerate(counts):
        ids = torch.randint(0, 64, (2, new))
        if step == 14:
            EVENTS[event](quick)
            EVENTS[event](slow)
            quick = copy.deepcopy(quick)
            mask = mask.flip(0) if event == "swap" else mask
        if step:
            came = torch.ones(2, new, dtype=torch.long)
            came[0, 0] = not (padded and step in (6, 17))
            mask = torch.cat([mask, came], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]
        with torch.no_grad():
            one, other = (
                model(ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits
                for cache in (quick, slow)
            )
        assert torch.equal(one, other), step
    for (_, layer), (_, twin) in zip(quick.paged_layers, slow.paged_layers, strict=True):
        layer.commit()
        twin.commit()
        assert torch.equal(layer.positions, twin.positions)
        torch.testing.assert_close(layer.block_scores(), twin.block_scores(), rtol=0, atol=0, equal_nan=True)
    assert written >= 4 or settings["block_size"] == 1


@pytest.mark.parametrize("setting", ["separate", "unequal"])
def test_memory_is_given_up(setting: str) -> None:
    """What was worked out ahead keeps no storage that the layer has given up."""
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, **{**SIZES, **SETTINGS[setting], "budget": 32})
    with torch.no_grad():
        for new in (40, 1, 1):
            model(torch.randint(0, 64, (1, new)), **{CACHE_ARGUMENT: cache})
    storage = weakref.ref(cache.layers[0].store.columns["keys"])
    cache.shrink(24)
    assert storage() is None
