"""Promise 8: a decoded token reads no tensor on the host, loops over nothing and allocates no storage."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from waiting import Watch, no_lists, within

pytestmark = pytest.mark.contract


def decode(rows: int, budget: int, steps: int = 11, **settings: Any) -> tuple[PagedEvictionCache, list[Watch]]:
    """Fill a cache, then decode with every update and every mask size watched: one watch per step."""
    model = models.shared("llama", "eager")
    lengths = [60 - (3 * row) % 23 for row in range(rows)]
    ids, mask = models.left_pad(models.prompts([*lengths[:-1], 60], seed=1))
    cache = PagedEvictionCache(model.config, **{"budget": budget, "block_size": 4, **settings})
    modes.forward(model, cache, ids, mask, 0, 60)
    pointers = [layer.keys.data_ptr() for layer in cache.layers]
    watches = []
    for step in range(steps + 8):
        ids, mask = torch.cat([ids, ids[:, 5:6]], dim=1), modes.extend(mask, 1)
        watch = Watch()
        with pytest.MonkeyPatch.context() as patch:
            for layer in cache.layers:
                patch.setattr(layer, "update", within(watch, layer.update))
            patch.setattr(cache, "get_mask_sizes", within(watch, cache.get_mask_sizes))
            modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
        if step >= 8:  # the pads are used up, every row overwrites its blocks
            watches.append(watch)
    assert [layer.keys.data_ptr() for layer in cache.layers] == pointers
    return cache, watches


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "random", "streaming_llm"])
def test_the_host_never_waits(policy: str, heads: str) -> None:
    _, watches = decode(5, 24, policy=policy, heads=heads)
    assert all(watch.operators for watch in watches)
    assert [watch.waiting for watch in watches if watch.waiting] == []


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"heads": "separate"}, {"policy": "h2o"}], ids=str)
def test_rows_that_are_full_at_other_moments_do_not_wait(settings: dict[str, Any]) -> None:
    model, rows = models.shared("llama", "paged_eviction"), models.prompts([20, 17, 14], seed=1)
    ids, mask = models.left_pad(rows)
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "policy": "keydiff", **settings})
    modes.forward(model, cache, ids, mask, 0, 20)
    waiting = []
    for step in range(24):
        ids, mask = torch.cat([ids, ids[:, 5:6]], dim=1), modes.extend(mask, 1)
        watch = Watch()
        with pytest.MonkeyPatch.context() as patch:
            for layer in cache.layers:
                patch.setattr(layer, "update", within(watch, layer.update))
            modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
        waiting += watch.waiting if step >= 12 else []  # all rows overwrite their blocks
    assert not cache.layers[0].state.known.counters.in_step
    assert waiting == []


@pytest.mark.parametrize("budget", [24, 100])
def test_the_whole_forward_waits_no_more_than_with_dynamic_cache(budget: int) -> None:
    """Mask construction included, growing and full."""
    model = models.shared("llama", "eager")
    counts = []
    for cache in (modes.dynamic(model), PagedEvictionCache(model.config, budget=budget, block_size=4)):
        ids, mask = models.left_pad(models.prompts([60, 40, 33], seed=1))
        modes.forward(model, cache, ids, mask, 0, 60)
        watch = Watch()
        for _ in range(15):
            ids, mask = torch.cat([ids, ids[:, 5:6]], dim=1), modes.extend(mask, 1)
            with watch:
                modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
        counts.append(len(watch.waiting))
    # On the CPU the mask's newest column is looked at once per step, to find a lone pad; nowhere else.
    assert counts[1] <= counts[0] + 15


def test_watch_notices() -> None:
    """The watch itself: each way of reading a tensor on the host is seen."""
    ones = torch.ones(3)
    for read in (lambda: ones[0].item(), lambda: bool(ones[0]), lambda: ones.nonzero(), lambda: ones[ones > 0]):
        with Watch() as watch:
            read()
        assert watch.waiting
    with pytest.raises(pytest.fail.Exception), no_lists():
        ones.tolist()


@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff"])
def test_no_loop_over_rows_or_tokens(policy: str) -> None:
    """The number of operators of a step depends neither on the rows nor on the budget."""
    counts = set()
    for rows, budget in [(2, 24), (17, 24), (2, 48)]:
        _, watches = decode(rows, budget, policy=policy)
        counts.add(max(sum(watch.operators.values()) for watch in watches))
    assert len(counts) == 1


def test_steps_between_two_victims_allocate_nothing_large() -> None:
    """All tensors that a common step makes are small next to the storage: nothing is copied or gathered."""
    cache, watches = decode(1, 48, steps=12, sink_tokens=4)
    storage = cache.layers[0].keys.numel()
    common = sorted(watch.largest for watch in watches)[:9]
    assert common[-1] <= storage // 8
