"""`PagedEvictionCache.shrink`: as if the cache had been made smaller and trimmed at that moment."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from evicting import exact
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators.cake import Cake

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
BLOCK = 4
STEPS = 17
#: Every kind of layer there is.
KINDS: dict[str, dict[str, Any]] = {
    "shared": {"policy": "keydiff"},
    "separate": {"policy": "paged_eviction", "heads": "separate"},
    "observed": {"policy": "h2o"},
    "observed separate": {"policy": "kvzip", "heads": "separate"},
    "window": {"policy": "snapkv(window=6)", "heads": "separate"},
    "pyramid": {"policy": "h2o", "allocator": "pyramid"},
    "heads": {"policy": "h2o", "allocator": "heads:[[0.4, 1.8], [1.2, 0.6]]"},
    "cake": {"policy": "h2o", "allocator": Cake(observed=8), "heads": "separate"},
    "ada_kv": {"policy": "h2o", "allocator": "ada_kv", "heads": "separate"},
}
EQUAL = ("shared", "separate", "observed", "observed separate", "window")


def make(kind: str, budget: int, **settings: Any) -> tuple[Any, PagedEvictionCache]:
    model = models.shared("llama", "sdpa" if kind in ("shared", "separate") else OURS)
    return model, models.paged(model.config, budget=budget, block_size=BLOCK, **KINDS[kind], **settings)


def decode(model: Any, cache: Any, ids: Tensor, mask: Tensor, steps: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Forced tokens one at a time; the text afterwards."""
    forced = torch.stack(models.prompts([steps] * len(ids), seed))
    for step in range(steps):
        ids, mask = torch.cat([ids, forced[:, step : step + 1]], dim=1), modes.extend(mask, 1)
        modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
    return ids, mask


def real_positions(cache: PagedEvictionCache) -> list[list[list[list[int]]]]:
    return [
        [[sorted(p for p in head if p >= 0) for head in heads] for heads in layer.positions.tolist()]
        for _, layer in cache.paged_layers
    ]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("lengths", [[40, 40], [40, 33, 9]], ids=["full", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_prompt_it_is_a_smaller_cache(kind: str, lengths: list[int], record: bool) -> None:
    """A prompt read into a large cache that is shrunk, or into a small one: the same from then on, slot by slot."""
    model, large = make(kind, 80, record_past=record)
    _, small = make(kind, 24, record_past=record)
    ids, mask = models.left_pad(models.prompts(lengths))
    for cache in (large, small):
        modes.forward(model, cache, ids, mask, 0, 40)
    large.shrink(24)
    small.crop(0)
    for steps in (0, 19):
        for cache in (large, small):
            decode(model, cache, ids, mask, steps)
            cache.crop(0)
        for ours, own in zip(large.layers, small.layers, strict=True):
            assert torch.equal(ours.positions, own.positions)
            assert ours.keys.shape == own.keys.shape
            real = ours.positions >= 0
            torch.testing.assert_close(ours.keys[:, :, : ours.held][real], own.keys[:, :, : own.held][real])
            for name, statistic in getattr(own, "observed", {}).items():
                found_here = ours.observed[name]
                where = real if statistic.shape == real.shape else ...
                torch.testing.assert_close(found_here[where], statistic[where])
        assert large.stats() == small.stats()


@pytest.mark.parametrize("kind", KINDS)
def test_twice_reset_and_rows(kind: str) -> None:
    model, cache = make(kind, 80)
    ids, mask = models.left_pad(models.prompts([60, 50]))
    modes.forward(model, cache, ids, mask, 0, 60)
    for budget in (48, 48, 24):
        cache.shrink(budget)
        assert sum(layer.budget or 0 for layer in cache.stats().layers) == 2 * budget
        if kind in EQUAL:
            assert [layer.keys.shape[2] for layer in cache.layers] == [budget] * 2
    cache.reorder_cache(torch.tensor([1, 0]))
    decode(model, cache, ids[[1, 0]], mask[[1, 0]], 9)
    cache.reset()
    assert cache.stats().largest_held == 0
    modes.forward(model, cache, ids, mask, 0, 60)
    _, fresh = make(kind, 24)
    modes.forward(model, fresh, ids, mask, 0, 60)
    assert real_positions(cache) == real_positions(fresh)


def test_an_empty_cache_and_a_share() -> None:
    model, cache = make("shared", 80)
    cache.shrink(24)
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    assert cache.stats().largest_held == cache.layers[0].keys.shape[2] == 24
    share = models.paged(model.config, budget="50%", block_size=BLOCK)
    modes.forward(model, share, ids, mask, 0, 40)
    with pytest.raises(ValueError, match=r"growth.*20"):
        share.shrink(24)
    share.shrink(12)
    assert share.stats().largest_held == 12


def test_what_waits_is_taken_in_first() -> None:
    model, cache = make("shared", 80, record_past=True)
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    assert cache.stats().largest_held == 0
    cache.shrink(24)
    assert (cache.stats().largest_held, cache.get_seq_length()) == (24, 40)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (84, ValueError, r"growth.*80"),
        (22, ValueError, r"budget=22.*block_size=4.*20.*24"),
        (8, ValueError, r"Smallest.*12"),
        (0, ValueError, "at least 1"),
        (24.0, TypeError, "whole number"),
        (True, TypeError, "whole number"),
        (None, ValueError, "budget="),
    ],
)
def test_refusals_change_nothing(budget: Any, error: type[Exception], message: str) -> None:
    model, cache = make("observed", 80)
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    before = cache.stats()
    with pytest.raises(error, match=message):
        cache.shrink(budget)
    assert cache.stats() == before


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "deepseek_v3", "qwen3_next"])
def test_family(family: str) -> None:
    if reason := models.unavailable(family) or models.recurrence_differs(family, "direct", True):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    cache = models.paged(model.config, budget=52, block_size=BLOCK, policy="h2o")
    ids, mask = models.left_pad(models.prompts([40, 33, 9]))
    with exact(model, cache, poison=True):
        modes.forward(model, cache, ids, mask, 0, 40)
        ids, mask = decode(model, cache, ids, mask, 3)
        cache.shrink(24)
        decode(model, cache, ids, mask, STEPS)
