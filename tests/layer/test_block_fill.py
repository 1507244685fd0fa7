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
from hf_paged_eviction.precision import fused

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


def _as_slowly(
    settings: dict[str, Any], event: Callable[..., None], padded: bool, counts: list[int], patch: pytest.MonkeyPatch
) -> int:
    """Compare with a cache that decides on each token by itself: an event before the 15th forward, a copy, a pad among
    single tokens. Returns how many tokens were written to slots that were worked out ahead."""
    model = models.shared("llama", "paged_eviction")
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

    patch.setattr(BlockFill, "write", count)
    torch.manual_seed(0)
    mask = torch.ones(2, counts[0], dtype=torch.long)
    if padded:
        mask[0, : counts[0] * 13 // 30] = 0
    for step, new in enumerate(counts):
        ids = torch.randint(0, 64, (2, new))
        if step == 14:
            event(quick)
            event(slow)
            quick = copy.deepcopy(quick)
            mask = mask.flip(0) if event is _swap else mask[:, : quick.get_seq_length()]
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
    return written


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_as_if_decided_one_by_one(
    setting: str, event: str, padded: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """An event in the middle of a block, a copy, a pad among single tokens, several tokens: bit for bit the same."""
    settings = {**SIZES, **SETTINGS[setting]}
    if event == "shrink" and setting in ("unequal", "ada_kv", "few bits, room left"):
        settings["budget"] = 32
    written = _as_slowly(settings, EVENTS[event], padded, [30, *[1] * 9, 3, *[1] * 14], monkeypatch)
    assert written >= 4 or settings["block_size"] == 1


GROWING = {**EVENTS, "protect": lambda cache: cache.protect([(8, 10)]), "crop": lambda cache: cache.crop(-2)}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("event", GROWING)
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in ("blocks ahead", "blocks of one")])
def test_as_if_appended_one_by_one(
    setting: str, event: str, padded: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """The same before the cache is full, and when it becomes so; its storage grows."""
    settings = {**SIZES, **SETTINGS[setting], "budget": 32}
    written = _as_slowly(settings, GROWING[event], padded, [5, *[1] * 9, 3, *[1] * 25], monkeypatch)
    assert written >= 20 or event in ("shrink", "record")


@pytest.mark.parametrize("compiled", [True, False])
def test_a_growing_layer_is_read_as_it_lies(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few bits, of so many slots that codes are read also without a compiler; the storage grows on the way."""
    if not compiled:
        monkeypatch.setattr(fused, "_missing", lambda device: "not now")
    settings = {"budget": 480, "policy": "keydiff", "heads": "separate", "bits": 4}
    written = _as_slowly(settings, lambda cache: None, False, [300, *[1] * 20], monkeypatch)
    assert written >= 30


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
