"""What gates say of tokens stays with them: the policy evicts what a slow one evicts that looks the marks up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_gate import SlowGate, one_layer, random_gates, slow_marks

import models
import modes
import rows
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.policies.needs import Cutoff
from hf_paged_eviction_lab.gates import Gate, Gates, install_gates, save_gates

OURS = "paged_eviction"
BLOCK = 4


@pytest.fixture(scope="module", params=[16, None], ids=["mlp", "line"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Gates, str]]:
    """A model of one layer with gates, these gates, and their file."""
    model = one_layer(OURS)
    gates = random_gates(model, request.param)
    file = str(tmp_path_factory.mktemp("gates") / "g.safetensors")
    save_gates(gates, file)
    with install_gates(model, file):
        yield model, gates, file


def make(model: Any, mode: str, policy: Any, **settings: Any) -> PagedEvictionCache:
    recording = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
    settings = {"budget": 24, "block_size": BLOCK, "record_past": recording, **settings}
    return models.paged(model.config, policy=policy, **settings)


def held(cache: PagedEvictionCache) -> list[Any]:
    """Positions by row and head, in order."""
    return [[sorted(head) for head in row] for row in cache.paged_layers[0][1].positions.tolist()]


def test_a_gate_is_what_the_loops_say() -> None:
    model = one_layer()
    for units in (16, None):
        layer = random_gates(model, units, seed=3).layers[0]
        hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        expected = [[slow_marks(layer, token) for token in row] for row in hidden.tolist()]
        torch.testing.assert_close(layer(hidden).mT, torch.tensor(expected))
        assert layer(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.each_value_once
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", modes.MODES)
def test_the_same_tokens_go(world: tuple[Any, Gates, str], mode: str, padded: bool, heads: str) -> None:
    model, gates, file = world
    inputs = modes.batch(mode, padded)
    slow = make(model, mode, SlowGate.of(model, gates), heads=heads)
    expected = modes.run(model, slow, mode, *inputs)
    ours = make(model, mode, f"gate:{file}", heads=heads)
    assert modes.run(model, ours, mode, *inputs).tolist() == expected.tolist()
    assert held(ours) == held(slow)
    assert ours.stats().evicted_tokens > 0


@pytest.mark.each_value_once
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", modes.MODES)
def test_the_same_tokens_score_above(world: tuple[Any, Gates, str], mode: str, padded: bool, heads: str) -> None:
    """With `keep_above` rows and heads hold different numbers of tokens."""
    model, gates, file = world
    cutoff = Cutoff(above=2.0, room=BLOCK)
    inputs = modes.batch(mode, padded)
    slow = make(model, mode, SlowGate.of(model, gates, cutoff), heads=heads, budget=36)
    expected = modes.run(model, slow, mode, *inputs)
    ours = make(model, mode, f"gate:{file}(keep_above=2.0, room={BLOCK})", heads=heads, budget=36)
    assert modes.run(model, ours, mode, *inputs).tolist() == expected.tolist()
    assert held(ours) == held(slow)


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
def test_with_other_options(world: tuple[Any, Gates, str], settings: dict[str, Any], mode: str) -> None:
    """Marks stay with their tokens, whatever becomes of keys and values."""
    model, gates, file = world
    cache = make(model, mode, f"gate:{file}", **settings)
    inputs = modes.batch(mode, True)
    modes.run(model, cache, mode, *inputs)
    slow = SlowGate.of(model, gates)
    layer = cache.paged_layers[0][1]
    layer.commit()
    marks = layer.marks.of(layer.store.columns, layer.held)
    if settings.get("bits") is None and settings.get("disposal") is None:
        expected = slow.score(context_of(layer))
        real = (layer.positions >= 0).expand_as(marks)
        torch.testing.assert_close(marks[real], expected[real])
    assert marks.isfinite().all()


def context_of(layer: Any) -> Any:
    keys, values = layer.store.read(layer.held)

    class Context:
        pass

    context = Context()
    context.keys, context.values = keys, values
    return context


def test_rows_do_not_depend_on_their_batch(world: tuple[Any, Gates, str]) -> None:
    model, _, file = world
    for policy in (f"gate:{file}", f"gate:{file}(keep_above=2.0, room=8)"):
        for turns in (None, [10, 2, 6, 3]):
            settings = {"budget": 24, "block_size": BLOCK, "policy": policy, "heads": "separate"}
            assert rows.compare(model, [40, 33, 9, 2], turns, **settings) > 0


def test_shrink_crop_and_rows(world: tuple[Any, Gates, str]) -> None:
    """What changes slots between forwards changes the marks with them."""
    model, gates, file = world
    both = (SlowGate.of(model, gates), f"gate:{file}")
    slow, ours = (make(model, "direct", policy, heads="shared") for policy in both)
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


def test_a_saved_cache_goes_on(world: tuple[Any, Gates, str], tmp_path: Path) -> None:
    model, _, file = world
    ids, mask = modes.batch("direct", True)
    ours = make(model, "direct", f"gate:{file}")
    modes.forward(model, ours, ids, mask, 0, 30)
    ours.save(tmp_path / "c.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "c.safetensors", model.config)
    elsewhere = Path(file).rename(tmp_path / "moved.safetensors")
    try:
        with pytest.raises(ValueError, match=r"g.safetensors'.*policy="):
            PagedEvictionCache.load(tmp_path / "c.safetensors", model.config)
        moved = PagedEvictionCache.load(tmp_path / "c.safetensors", model.config, policy=f"gate:{elsewhere}")
    finally:
        elsewhere.rename(file)
    for cache in (ours, loaded, moved):
        for at in range(30, 40):
            modes.forward(model, cache, ids, mask, at, at + 1)
    assert held(loaded) == held(moved) == held(ours)


def test_two_layers_of_different_caches_share_nothing(world: tuple[Any, Gates, str]) -> None:
    """Several caches, of gates and of other policies, take turns in one model."""
    model, _, file = world
    ids, mask = modes.batch("direct", True)
    alone = make(model, "direct", Gate(file))
    expected = modes.direct(model, alone, ids, mask, 8)
    one, other, plain = (make(model, "direct", policy) for policy in (Gate(file), Gate(file), "keydiff"))
    for cache in (other, plain):
        modes.forward(model, cache, ids, mask, 0, 21)
    assert modes.direct(model, one, ids, mask, 8).tolist() == expected.tolist()
    assert held(one) == held(alone)
