"""Blocks that are fetched ahead change nothing but the time."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.disposals.recall.host import HostBlocks, Stage, places_of

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
    assert without.stats().faults == ahead.stats().faults > 0
    assert sum(stage.foreseen for stage in stages(ahead)) > 0
    assert all(stage.foreseen == stage.bytes == 0 for stage in stages(without))


def test_generate_says_the_same() -> None:
    model = models.shared("llama", OURS)
    sequences = []
    for cache in caches(model, "shared", 4):
        sequences.append(modes.run(model, cache, "beam", *modes.batch("beam", True)).tolist())
    assert sequences[0] == sequences[1]


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


def test_what_is_taken_is_what_is_in_host_memory() -> None:
    """Half of it was fetched ahead, in another order, and some of that for the second time."""
    states = torch.randn(3, 2, 9 * 4, 5), torch.randn(3, 2, 9 * 4, 7)
    host = HostBlocks(states, 4, 2)
    host.reserve(9)
    row, head, position = (index.flatten() for index in torch.meshgrid(*map(torch.arange, (3, 2, 36)), indexing="ij"))
    host.write(row, head, position, [kind[row, head, position] for kind in states])
    stage = Stage()
    stage.fill(host, places_of(torch.tensor([[[4, 1], [-1, 2]], [[3, 0], [7, 8]], [[-1, -1], [0, 5]]])))
    stage.fill(host, places_of(torch.tensor([[[1, 6], [2, -1]], [[-1, 3], [8, 1]], [[-1, -1], [5, 4]]])))
    blocks = torch.tensor([[[6, 1], [-1, 7]], [[0, 3], [-1, 8]], [[2, -1], [4, -1]]])
    taken = stage.take(host, places_of(blocks))
    assert stage.foreseen == 5
    wanted = [(row, set_, block) for row in range(3) for set_ in range(2) for block in blocks[row, set_].tolist()]
    wanted = [place for place in wanted if place[2] >= 0]
    assert taken.shape == (len(wanted), 1, 4, 12)
    for block_states, (row, set_, block) in zip(taken, wanted, strict=True):
        keys, values = (kind[row, set_, block * 4 : block * 4 + 4] for kind in states)
        assert torch.equal(block_states[0], torch.cat([keys, values], dim=-1))


@pytest.mark.parametrize(
    ("text", "message"), [("prefetch=-1", r"prefetch.*0"), ("blocks=all, prefetch=2", "nothing to prefet")]
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedEvictionCache(models.shared("llama", OURS).config, **ONE, disposal=f"recall({text})")


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
