"""Blocks that are fetched ahead change nothing but the time."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_lab.recall import traffic
from hf_paged_eviction_lab.recall.host import Stage

OURS = "paged_eviction"
ONE: dict[str, Any] = {"budget": 28, "block_size": 4, "policy": "keydiff"}

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("blocks=3, prefetch={}", {}),
    "separate": ("blocks=2, layers=2, prefetch={}", {"heads": "separate"}),
    "every": ("blocks=2, every=3, prefetch={}", {}),
}


def caches(model: Any, way: str, ahead: int) -> list[PagedEvictionCache]:
    text, settings = WAYS[way]
    return [
        PagedEvictionCache(model.config, **ONE, **settings, disposal=f"recall({text.format(count)})")
        for count in (0, ahead)
    ]


def stages(cache: PagedEvictionCache) -> list[Stage]:
    return [layer.action.stage for _, layer in cache.paged_layers]


@pytest.mark.parametrize("way", WAYS)
def test_same_numbers(way: str) -> None:
    """No bit of any logit differs, with pads, a second turn and other rows on the way; some blocks were foreseen."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([66, 60, 30], seed=3))
    without, ahead = caches(model, way, 3)
    rows = torch.tensor([0, 1, 2])
    spans = [(0, 40), *((at, at + 1) for at in range(40, 52)), (52, 57), *((at, at + 1) for at in range(57, 66))]
    for start, stop in spans:
        if start == 60:
            rows = torch.tensor([1, 1, 0])
            for cache in (without, ahead):
                cache.reorder_cache(rows)
        logits = [modes.forward(model, cache, ids[rows], mask[rows], start, stop) for cache in (without, ahead)]
        assert torch.equal(*logits)
    assert traffic(without).faults == traffic(ahead).faults > 0
    assert sum(stage.foreseen for stage in stages(ahead)) > 0
    assert all(stage.foreseen == stage.bytes == 0 for stage in stages(without))


def test_the_stage_is_counted_and_bounded() -> None:
    """Beside the summaries, at most so many blocks of each row are on the device."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([90, 81], seed=3))
    without, ahead = caches(model, "shared", 2)
    most = 0
    for start, stop in [(0, 60), *((at, at + 1) for at in range(60, 90))]:
        for cache in (without, ahead):
            modes.forward(model, cache, ids, mask, start, stop)
        more = ahead.stats().summary_bytes - without.stats().summary_bytes
        assert more == sum(stage.bytes for stage in stages(ahead))
        most = max(most, more)
    layers, rows, blocks, of_a_block = 2, 2, 2, 4 * 2 * 2 * 8 * 4  # tokens, heads, keys and values, width, float32
    assert 0 < most <= layers * rows * blocks * of_a_block
    ahead.reset()
    assert ahead.stats().summary_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator() -> None:
    """Copies on streams of their own bring the same blocks as a CPU does, with one wait for each layer and choice."""
    logits = []
    for device in ("cpu", "cuda"):
        model = models.build("llama", OURS).to(device).double()
        ids, mask = (tensor.to(device) for tensor in models.left_pad(models.prompts([90, 81], seed=3)))
        _, cache = caches(model, "shared", 3)
        spans = [(0, 40), *((at, at + 1) for at in range(40, 90))]
        logits.append([modes.forward(model, cache, ids, mask, start, stop)[:, -1].cpu() for start, stop in spans])
        assert sum(stage.foreseen for stage in stages(cache)) > 0
    for one, other in zip(*logits, strict=True):
        assert (one - other).abs().max() < 1e-8
