"""`bits=` with `positions="cache"`: what is decoded is turned, in every mode and whatever becomes of slots and rows."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from evicting import binding
from hf_paged_eviction import PagedEvictionCache, StoragePool
from reference import assert_evicted
from rounded import RoundedRecorder, assert_rounded
from rows import compare
from slow_positions import PlacesRecorder

static_only = pytest.mark.skipif(models.VERSION < (5, 14), reason="static=True needs transformers 5.14 or later")
BOTH = [False, pytest.param(True, marks=static_only)]


@functools.cache
def shared(attention: str = "sdpa") -> Any:
    """In double precision a step of the rounding is hardly ever taken for the noise of the last digit."""
    return models.build("llama", attention).double()


def agree(layer: Any) -> None:
    """What attention is shown is what scores read, turned by what the table says."""
    store, held = layer.store, layer.held
    if not held or store.turning is None:
        return
    read, shown, real = store.read(held), store.shown(held), (layer.positions >= 0)[..., None]
    of = store.turning.of
    expected = torch.where(real, store.turning.rotary.rotate_by(read[of].double(), layer.shifts), 0.0)
    assert_close(torch.where(real, shown[of], 0.0), expected)
    assert torch.equal(*(torch.where(real, states[1 - of], 0.0) for states in (read, shown)))


class BothRecorder(RoundedRecorder, PlacesRecorder):
    """Rounded as `RoundedRecorder` says, then turned to the places that `PlacesRecorder` noted, by the definition of
    the rotation of Llama."""

    def _check(self, layer: Any, index: int, *placed: Any) -> None:
        if placed:
            PlacesRecorder._check(self, layer, index, *placed)
            return
        agree(layer)
        RoundedRecorder._check(self, layer, index)

    def shown(self, index: int, keys: Tensor, count: int) -> Tensor:
        shifts = torch.zeros(keys.shape[:3], dtype=torch.float64)
        for row, heads in enumerate(self.columns[count - 1].shifts[index]):
            for head, moved in enumerate(heads):
                for column, by in moved.items():
                    shifts[row, head, column] = by
        angles = shifts[..., None] * self.model.model.rotary_emb.inv_freq.double()
        first, second = keys.chunk(2, dim=-1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, dim=-1).to(keys.dtype)


def followed(mode: str, padded: bool, bits: Any, attention: str = "sdpa", **settings: Any) -> Any:
    model = shared(attention)
    cache = binding(model, mode, bits=bits, positions="cache", **settings)
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    with BothRecorder(model, cache, pair, latent=False) as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert_evicted(recorder)
    assert any(layer.shifts.amax() > 0 for _, layer in cache.paged_layers)
    return model, recorder


@pytest.mark.parametrize(
    ("mode", "padded", "bits", "policy", "heads"),
    [
        ("greedy", True, 4, "keydiff", "separate"),
        ("chunked_prefill", True, 2, "random", "shared"),
        ("three_turns", True, (8, 2), "h2o", "separate"),
        ("direct", True, (None, 4), "streaming_llm", "shared"),
    ],
)
def test_a_slow_cache_of_few_bits_at_other_places(mode: str, padded: bool, bits: Any, policy: str, heads: str) -> None:
    attention = "paged_eviction" if policy == "h2o" else "sdpa"
    model, recorder = followed(mode, padded, bits, attention, policy=policy, heads=heads)
    assert_rounded(model, recorder)


def test_the_reference_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = followed("direct", True, 4, policy="keydiff")
    monkeypatch.setattr(BothRecorder, "shown", RoundedRecorder.shown)
    with pytest.raises(AssertionError):
        assert_rounded(model, recorder, 1e-2)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_neox"])
@pytest.mark.parametrize("static", BOTH)
def test_latents_and_part_of_a_head(family: str, static: bool) -> None:
    if family == "deepseek_v3" and not models.caches_latents():
        pytest.skip("this release expands latents before it caches them")
    model = models.shared(family)
    cache = binding(model, "greedy", bits=8, positions="cache", policy="keydiff", static=static)
    modes.run(model, cache, "greedy", *modes.batch("greedy", True))
    for _, layer in cache.paged_layers:
        agree(layer)
        assert layer.shifts.amax() > 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    settings = {"budget": 24, "block_size": 4, "policy": "keydiff", "bits": 2, "positions": "cache"}
    assert compare(shared(), [40, 23, 1], [9, 2, 5], **settings) > 0


# ---- life ---------------------------------------------------------------------------------------------------------


def filled(**settings: Any) -> tuple[Any, PagedEvictionCache, Tensor, Tensor]:
    model = shared()
    fixed = {"budget": 24, "block_size": 4, "bits": 4, "positions": "cache", "policy": "keydiff"}
    cache = PagedEvictionCache(model.config, **{**fixed, **settings})
    ids, mask = models.left_pad(models.prompts([60, 48], seed=1))
    read(model, cache, ids, mask)
    return model, cache, ids, mask


def read(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> None:
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 39))]:
        modes.forward(model, cache, ids, mask, start, stop)


def go_on(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    steps = [modes.forward(model, cache, ids, mask, at, at + 1)[:, -1] for at in range(39, ids.shape[1])]
    return torch.stack(steps)


def test_static_says_the_same() -> None:
    if models.VERSION < (5, 14):
        pytest.skip("static=True needs transformers 5.14 or later")
    said = [go_on(*filled(static=static, heads="separate")) for static in (False, True)]
    assert_close(said[0], said[1])


@pytest.mark.parametrize("static", BOTH)
def test_copy_save_offload_rows_and_reset(static: bool, tmp_path: Path) -> None:
    model, cache, ids, mask = filled(static=static)
    copied, moved, repeated = (copy.deepcopy(cache) for _ in range(3))
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    assert loaded.stats().storage_bytes == cache.stats().storage_bytes
    for layer in moved.layers:
        layer.offload()
        layer.prefetch()
    repeated.batch_repeat_interleave(2)
    repeated.reorder_cache(torch.tensor([0, 1, 3, 2]))
    expected = go_on(model, cache, ids, mask)
    for other in (copied, moved, loaded):
        assert torch.equal(go_on(model, other, ids, mask), expected)
    twice = go_on(model, repeated, ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
    assert_close(twice, expected.repeat_interleave(2, 1))
    cache.reset()
    read(model, cache, ids, mask)
    assert torch.equal(go_on(model, cache, ids, mask), expected)


@pytest.mark.parametrize("static", BOTH)
def test_pads_in_the_middle(static: bool) -> None:
    """Slots are put into another order before the first is overwritten, and shifts go along."""
    model = shared()
    ids = torch.stack(models.prompts([40, 40], seed=1))
    mask = torch.ones_like(ids)
    mask[0, 6] = mask[0, 7] = mask[1, :3] = 0
    cache = PagedEvictionCache(
        model.config, budget=24, block_size=4, bits=4, policy="keydiff", positions="cache", static=static
    )
    for start, stop in [(0, 10), *((at, at + 1) for at in range(10, 40))]:
        modes.forward(model, cache, ids, mask, start, stop)
        for layer in cache.layers:
            agree(layer)
    assert all(layer.shifts.amax() > 0 for layer in cache.layers)


def test_crop_and_shrink() -> None:
    model, cache, ids, mask = filled()
    cache.crop(-1)
    modes.forward(model, cache, ids, mask, 38, 39)
    cache.shrink(16)
    for layer in cache.layers:
        agree(layer)
    go_on(model, cache, ids, mask)
    for layer in cache.layers:
        agree(layer)


def test_bytes_and_a_pool() -> None:
    """Not a copy: 4 bytes per slot, for all heads or, where they hold other tokens, for each."""
    pool = StoragePool()
    for heads, sets in (("shared", 1), ("separate", 2)):
        plain = filled(positions="text", heads=heads)[1].stats().storage_bytes
        cache = filled(heads=heads, pool=pool)[1]
        taken = cache.stats().storage_bytes
        assert taken == plain + 2 * 2 * sets * 24 * 4
        assert pool.taken_bytes == taken
        cache.release()
        assert pool.taken_bytes == 0


def test_nothing_changes_while_everything_is_held() -> None:
    said = [go_on(*filled(budget=80, positions=positions)) for positions in ("text", "cache")]
    assert torch.equal(*said)
