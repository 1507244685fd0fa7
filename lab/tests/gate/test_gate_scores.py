"""Scores of gates stay with their tokens: the policy evicts what a slow one evicts that looks the scores up."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_gate import SlowGate, one_layer, random_gates, slow_scores

import models
import modes
import rows
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_lab.gate import Gate, Gates, install_gates, save_gates

BLOCK = 4
World = tuple[Any, Gates, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A model of one layer with gates, these gates, and their file."""
    model = one_layer()
    gates = random_gates(model)
    file = str(tmp_path_factory.mktemp("gates") / "g.safetensors")
    save_gates(gates, file)
    with install_gates(model, file):
        yield model, gates, file


def make(model: Any, mode: str, policy: Any, **settings: Any) -> PagedEvictionCache:
    settings = {"budget": 24, "block_size": BLOCK, "record_past": mode in modes.SPECULATIVE, **settings}
    return models.paged(model.config, policy=policy, **settings)


def held(cache: PagedEvictionCache) -> list[Any]:
    """Positions by row and head, in order."""
    return [[sorted(head) for head in row] for row in cache.paged_layers[0][1].positions.tolist()]


def assert_scores(cache: PagedEvictionCache, slow: SlowGate, rtol: float = 1e-5) -> None:
    """Each held token but those of the block that is being filled has the score that its value tells."""
    layer = cache.paged_layers[0][1]
    layer.commit()
    _, values = layer.store.read(layer.held)
    last = layer.table.seen - layer.table.pads - BLOCK
    scored = (layer.positions >= 0) & (layer.positions < last[:, None, None])
    expected = slow.look_up(values)
    assert scored.any()
    torch.testing.assert_close(layer.observed["score"][scored], expected[scored], rtol=rtol, atol=0)


def test_a_gate_is_what_the_loops_say() -> None:
    layer = random_gates(one_layer(), seed=3).layers[0]
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    expected = [[slow_scores(layer, token) for token in row] for row in hidden.tolist()]
    torch.testing.assert_close(layer.log_scores(hidden).exp(), torch.tensor(expected))
    assert layer.log_scores(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.each_value_once
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", modes.MODES)
def test_the_same_tokens_go(world: World, mode: str, padded: bool, heads: str) -> None:
    model, gates, file = world
    inputs = modes.batch(mode, padded)
    slow = make(model, mode, SlowGate.of(model, gates), heads=heads)
    expected = modes.run(model, slow, mode, *inputs)
    ours = make(model, mode, Gate(file), heads=heads)
    assert modes.run(model, ours, mode, *inputs).tolist() == expected.tolist()
    assert held(ours) == held(slow)
    assert ours.stats().evicted_tokens > 0


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4},
        {"positions": "cache"},
        {"allocator": "ada_kv", "heads": "separate"},
        {"allocator": "pyramid"},
        {"disposal": "merge"},
        {"budget": "16kB"},
        {"budget": "50%"},
        {"recent_tokens": 9},
        {"record_past": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["direct", "two_turns", "beam"])
def test_with_other_options(world: World, settings: dict[str, Any], mode: str) -> None:
    model, gates, file = world
    cache = make(model, mode, Gate(file), **settings)
    modes.run(model, cache, mode, *modes.batch(mode, True))
    if not {"bits", "disposal"} & settings.keys():
        assert_scores(cache, SlowGate.of(model, gates))
    assert cache.stats().evicted_tokens > 0 or "disposal" in settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scores_are_not_rounded_to_the_type_of_the_model(world: World, dtype: torch.dtype) -> None:
    _, gates, file = world
    model = one_layer().to(dtype)
    with install_gates(model, file):
        cache = make(model, "direct", Gate(file))
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert_scores(cache, SlowGate.of(model.float(), gates), rtol=1e-5 if dtype == torch.float64 else 0.1)
    scores = cache.paged_layers[0][1].observed["score"]
    assert not torch.equal(scores, scores.to(dtype).float()) or dtype == torch.float64


def test_a_row_is_what_it_is_alone(world: World) -> None:
    model, _, file = world
    for turns in (None, [10, 2, 6, 3]):
        settings = {"budget": 24, "block_size": BLOCK, "policy": Gate(file)}
        assert rows.compare(model, [40, 33, 9, 2], turns, **settings) > 0


def test_shrink_crop_and_rows(world: World) -> None:
    model, gates, file = world
    slow, ours = (make(model, "direct", policy, heads="shared") for policy in (SlowGate.of(model, gates), Gate(file)))
    ids, mask = models.left_pad(models.prompts([20, 14, 9]))
    for cache in (slow, ours):
        cache.activate_past_recording()
        modes.forward(model, cache, ids, mask, 0, 17)
        modes.forward(model, cache, ids, mask, 17, 20)
        cache.crop(-2)
        modes.forward(model, cache, ids, mask, 18, 20)
        cache.crop(0)
        cache.shrink(16)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        more, real = models.left_pad(models.prompts([9, 9, 9, 9], seed=7))
        both = torch.cat([ids[[2, 2, 0, 0]], more], 1)
        full = torch.cat([mask[[2, 2, 0, 0]], real], 1)
        for start, stop in ((20, 23), *((at, at + 1) for at in range(23, 29))):
            modes.forward(model, cache, both, full, start, stop)
    assert held(ours) == held(slow)


@pytest.mark.parametrize("first", [30, 35], ids=["whole_block", "within_a_block"])
def test_a_saved_cache_goes_on_with_the_same_gates_only(world: World, first: int, tmp_path: Path) -> None:
    model, _, file = world
    ids, mask = modes.batch("direct", True)
    ours = make(model, "direct", Gate(file))
    modes.forward(model, ours, ids, mask, 0, 28)
    for at in range(28, first):
        modes.forward(model, ours, ids, mask, at, at + 1)
    ours.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"pass policy="):
        PagedEvictionCache.load(tmp_path / "c.safetensors", model.config)
    with pytest.raises(ValueError, match=r"policy= is .gate"):
        other = Gate(random_gates(model, seed=5))
        PagedEvictionCache.load(tmp_path / "c.safetensors", model.config, policy=other)
    loaded = PagedEvictionCache.load(tmp_path / "c.safetensors", model.config, policy=Gate(file))
    for at in range(first, 40):
        logits = [modes.forward(model, cache, ids, mask, at, at + 1) for cache in (ours, loaded)]
        assert torch.equal(*logits), at
    assert held(loaded) == held(ours)


def test_a_copy_goes_on(world: World) -> None:
    model, _, file = world
    ids, mask = modes.batch("direct", True)
    ours = make(model, "direct", Gate(file))
    for start, stop in ((0, 28), (28, 29), (29, 30)):
        modes.forward(model, ours, ids, mask, start, stop)
    twin = copy.deepcopy(ours)
    for cache in (ours, twin):
        for at in range(30, 40):
            modes.forward(model, cache, ids, mask, at, at + 1)
    assert held(twin) == held(ours)


def test_caches_take_turns_in_one_model(world: World) -> None:
    model, _, file = world
    ids, mask = modes.batch("direct", True)
    alone = make(model, "direct", Gate(file))
    expected = modes.direct(model, alone, ids, mask, 8)
    one, other, plain = (make(model, "direct", policy) for policy in (Gate(file), Gate(file), "keydiff"))
    for cache in (other, plain):
        modes.forward(model, cache, ids, mask, 0, 21)
    assert modes.direct(model, one, ids, mask, 8).tolist() == expected.tolist()
    assert held(one) == held(alone)
