"""`bits=`: logits are those of a slow cache that rounds the same tokens, in every mode and for every kind of layer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_no_synchronisation import Watch, no_lists

import models
import modes
import rows
from closeness import assert_close
from evicting import KINDS, binding
from hf_paged_eviction import PagedEvictionCache, StoragePool
from hf_paged_eviction.precision.coded import CodedStore
from reference import assert_evicted
from rounded import RoundedRecorder, assert_rounded

pytestmark = pytest.mark.contract

#: Their sum of products of experts exists in lower precision only.
SINGLE = ("deepseek_v3", "gpt_oss", "llama4", "qwen3_next")


@functools.cache
def shared(family: str, attention: str = "sdpa") -> Any:
    """In double precision a step of the rounding is hardly ever taken for the noise of the last digit."""
    model = models.build(family, attention)
    return model if family in SINGLE else model.double()


def check(family: str, mode: str, padded: bool, bits: Any, attention: str = "sdpa", **settings: Any) -> None:
    model = shared(family, attention)
    cache = binding(model, mode, bits=bits, **settings)
    ids, mask = modes.batch(mode, padded)
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    with RoundedRecorder(model, cache, pair, latent=family == "deepseek_v3") as recorder:
        modes.run(model, cache, mode, ids, mask)
    assert_evicted(recorder)
    assert_rounded(model, recorder)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "h2o"])
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("bits", [4, (8, 2)], ids=str)
def test_every_mode(mode: str, padded: bool, bits: Any, policy: str, heads: str) -> None:
    check("llama", mode, padded, bits, "paged_eviction", policy=policy, heads=heads)


def test_sinks_of_the_model() -> None:
    """Other families, policies and allocators are drawn by the fuzz."""
    if reason := models.unavailable("gpt_oss"):
        pytest.skip(reason)
    check("gpt_oss", "two_turns", True, 4, heads="separate")


def test_shares_of_the_first_prompt() -> None:
    check("llama", "two_turns", True, 4, "paged_eviction", allocator="first_prompt", heads="separate")


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1, "budget": 2, "sink_tokens": 0},
        {"block_size": 4, "budget": 24, "sink_tokens": 13},
        {"block_size": 16, "budget": 48},
        {"block_size": 3, "budget": 15, "sink_tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("mode", "bits"), [("greedy", 8), ("direct", (None, 2)), ("two_turns", 2)], ids=str)
def test_sizes(mode: str, bits: Any, settings: dict[str, int]) -> None:
    check("llama", mode, True, bits, **settings)


@pytest.mark.parametrize(("budget", "turns"), [(24, None), (48, [9, 2, 5])], ids=["full", "growing, ragged turns"])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "h2o"])
def test_a_row_does_not_depend_on_its_batch(policy: str, budget: int, turns: list[int] | None) -> None:
    settings = {"budget": budget, "block_size": 4, "policy": policy, "bits": 2}
    assert rows.compare(shared("llama", "paged_eviction"), [40, 23, 9], turns, **settings)


def test_lone_pads_and_a_row_of_pads_alone() -> None:
    """A row that has nothing to read yet, in the first forward and between single tokens."""
    model = shared("llama")
    ids = torch.stack(models.prompts([40, 40], seed=2))
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    mask[0, 20] = mask[0, 21] = mask[0, 30] = 0
    settings = {"budget": 16, "block_size": 4, "bits": 4}
    cache, alone = (PagedEvictionCache(model.config, **settings) for _ in range(2))
    last = None
    for start, stop in [(0, 6), (6, 12), *((at, at + 1) for at in range(12, 40))]:
        last = modes.forward(model, cache, ids, mask, start, stop)[0]
    own = ids[:1][:, mask[0].bool()]
    for at in range(own.shape[1]):
        expected = modes.forward(model, alone, own, torch.ones_like(own), at, at + 1)[0]
    assert last is not None
    assert_close(last[-1], expected[-1])


def test_scores_are_those_of_the_tokens_as_they_came() -> None:
    """What the first layer reads does not depend on the cache, so it evicts the same at any precision."""
    model = shared("llama")
    ids, mask = models.left_pad(models.prompts([60, 41], seed=1))
    for policy in ("paged_eviction", "key_norm", "value_norm"):
        held = []
        for bits in (None, 2):
            cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy=policy, bits=bits)
            for start, stop in [(0, 10), (10, 13), *((at, at + 1) for at in range(13, 40)), (40, 47), (47, 48)]:
                modes.forward(model, cache, ids, mask, start, stop)
            held.append(cache.layers[0].positions.tolist())
        assert held[0] == held[1], policy


# ---- static caches ------------------------------------------------------------------------------------------------

static_only = pytest.mark.skipif(models.VERSION < (5, 14), reason="static=True needs transformers 5.14 or later")
STATIC_MODES = ("greedy", "beam", "chunked_prefill", "three_turns")


@contextmanager
def recorded(model: Any) -> Iterator[list[torch.Tensor]]:
    """The last logits of each forward."""
    said, forward = [], model.forward

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        said.append(output.logits[:, -1].clone())
        return output

    model.__dict__["forward"] = call
    try:
        yield said
    finally:
        del model.__dict__["forward"]


@static_only
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", STATIC_MODES)
@pytest.mark.parametrize("policy", ["paged_eviction", "h2o"])
@pytest.mark.parametrize("budget", [24, 52])
def test_static(mode: str, padded: bool, policy: str, budget: int) -> None:
    model, said = shared("llama", "paged_eviction"), []
    for static in (False, True):
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4, policy=policy, bits=4, static=static)
        with recorded(model) as logits:
            modes.run(model, cache, mode, *modes.batch(mode, padded))
        said.append((torch.stack([each.flatten() for each in logits]), cache.layers[1].positions))
    assert torch.equal(said[0][1], said[1][1])
    assert_close(said[0][0], said[1][0])


@static_only
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen2"])
def test_static_families(family: str) -> None:
    model, said = shared(family), []
    for static in (False, True):
        cache = binding(model, "greedy", bits=(8, 4), static=static)
        with recorded(model) as logits:
            modes.run(model, cache, "greedy", *modes.batch("greedy", True))
        said.append(torch.stack(logits))
    assert_close(said[0], said[1])


@static_only
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff"])
@pytest.mark.parametrize("budget", [32, 40])
def test_static_with_pads_in_the_middle(policy: str, budget: int) -> None:
    """They are moved to the lowest slots when the storage fills; what is not rounded moves along."""
    model = shared("llama")
    ids = torch.stack(models.prompts([60, 60], seed=2))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[0, 20:23] = mask[1, 20:24] = 0
    plan = [(0, 20), (20, 28), *((at, at + 1) for at in range(28, 60))]
    said = []
    for static in (False, True):
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4, policy=policy, bits=4, static=static)
        said.append([modes.forward(model, cache, ids, mask, *part)[:, -1] for part in plan])
    for at, (ours, theirs) in enumerate(zip(*said, strict=True)):
        assert_close(ours, theirs, f"forward {at}")


@static_only
def test_a_compiled_step_is_one_graph() -> None:
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    model, said = models.build("llama").double(), []
    ids, mask = models.left_pad(models.prompts([30, 21], seed=1))
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    for how in ({"disable_compile": True}, {"compile_config": config}):
        settings = {"bits": 4, "static": True}
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
        said.append(modes.generate(model, cache, ids, mask, 30, **how))
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    assert said[0].tolist() == said[1].tolist()


@static_only
@pytest.mark.parametrize("static", [False, True])
def test_the_host_never_waits(static: bool) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, bits=4, static=static)
    ids, mask = models.left_pad(models.prompts([60, 60], seed=1))
    modes.forward(model, cache, ids, mask, 0, 40)
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        for layer in cache.layers:

            def update(*args: Any, call: Any = layer.update, **kwargs: Any) -> Any:
                with watch, no_lists():
                    return call(*args, **kwargs)

            patch.setattr(layer, "update", update)
        for at in range(40, 60):
            with watch, no_lists():
                cache.prepare_step()
            modes.forward(model, cache, ids, mask, at, at + 1)
    assert watch.operators
    assert watch.waiting == []


# ---- life ---------------------------------------------------------------------------------------------------------


def filled(steps: int = 7, **settings: Any) -> tuple[Any, PagedEvictionCache, torch.Tensor, torch.Tensor]:
    model = shared("llama")
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "bits": 4, **settings})
    ids, mask = models.left_pad(models.prompts([60, 48], seed=1))
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 30 + steps))]:
        modes.forward(model, cache, ids, mask, start, stop)
    return model, cache, ids, mask


def go_on(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, start: int = 37) -> torch.Tensor:
    steps = [modes.forward(model, cache, ids, mask, at, at + 1)[:, -1] for at in range(start, ids.shape[1])]
    return torch.stack(steps)


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=static_only)])
def test_copy_reset_offload_and_rows(static: bool) -> None:
    model, cache, ids, mask = filled(static=static)
    copied, moved, repeated = (copy.deepcopy(cache) for _ in range(3))
    moved.offload(0, only_non_sliding=False) if hasattr(moved, "offload") else None
    for layer in moved.layers:
        layer.offload()
        layer.prefetch()
    repeated.batch_repeat_interleave(2)
    repeated.reorder_cache(torch.tensor([0, 1, 3, 2]))
    expected = go_on(model, cache, ids, mask)
    assert torch.equal(go_on(model, copied, ids, mask), expected)
    assert torch.equal(go_on(model, moved, ids, mask), expected)
    twice = go_on(model, repeated, ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
    assert_close(twice, expected.repeat_interleave(2, 1))
    cache.reset()
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 37))]:
        modes.forward(model, cache, ids, mask, start, stop)
    assert torch.equal(go_on(model, cache, ids, mask), expected)


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=static_only)])
def test_save_and_load(static: bool, tmp_path: Path) -> None:
    """A loaded cache goes on with the same codes, in the middle of a block."""
    model, cache, ids, mask = filled(static=static)
    path = tmp_path / "context.safetensors"
    cache.save(path)
    loaded = PagedEvictionCache.load(path, model.config)
    assert torch.equal(go_on(model, loaded, ids, mask), go_on(model, cache, ids, mask))
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert all(map(torch.equal, ours.store.tensors, theirs.store.tensors))


def test_a_budget_in_bytes() -> None:
    """As many tokens as fit beside those that are not rounded, and not one block more."""
    tokens = {}
    for bits in (None, 8, 2):
        cache = filled(budget="16KiB", bits=bits)[1]
        tokens[bits] = cache.stats().budget
        assert cache.stats().storage_bytes <= 16 * 1024
        more = filled(budget=tokens[bits] + 4, bits=bits, pool=StoragePool())[1]
        assert more.stats().storage_bytes > 16 * 1024
    assert tokens[None] < tokens[8] < tokens[2]
    with pytest.raises(ValueError, match="not rounded"):
        filled(budget="2500B")


def test_shrink_keeps_codes() -> None:
    model, cache, ids, mask = filled()
    before, codes = cache.layers[0].positions, [part.clone() for part in cache.layers[0].store.tensors]
    cache.shrink(16)
    layer = cache.layers[0]
    kept = (layer.positions[:, 0, :, None] == before[:, 0, None, :]).int().argmax(-1)
    held = kept[:, None, :, None]
    rounded = (layer.positions >= 4) & (layer.positions < layer.positions.amax(-1, keepdim=True) - 7)
    assert rounded.any()
    for now, part in zip(layer.store.tensors, codes, strict=True):
        old = part.gather(2, held.expand(-1, part.shape[1], -1, part.shape[-1]))
        there = rounded[:, : part.shape[1]]
        assert torch.equal(now[there], old[there])
    assert go_on(model, cache, ids, mask).isfinite().all()


def test_a_pool_gets_everything_back() -> None:
    pool = StoragePool()
    model, cache, ids, mask = filled(pool=pool)
    taken = cache.stats().storage_bytes
    assert pool.taken_bytes == taken
    cache.release()
    assert (pool.taken_bytes, pool.free_bytes) == (0, taken)
    _, second, _, _ = filled(pool=pool)
    assert (pool.taken_bytes, pool.free_bytes) == (taken, 0)
    assert go_on(model, second, ids, mask).isfinite().all()


def test_bytes() -> None:
    """Budget and stats count tokens as ever; the bytes are those of the tensors there are."""
    bytes_of = {}
    for bits in (None, 8, 4, 3, 2, (8, None)):
        _, cache, _, _ = filled(bits=bits)
        stats = cache.stats()
        assert (stats.largest_held, stats.budget) == (24, 24)
        bytes_of[bits] = stats.storage_bytes
        assert sum(stats.storage_parts.values()) == stats.storage_bytes
    rows, heads, dim, layers, budget, exact = 2, 2, 8, 2, 24, 4 + 4
    beside = rows * heads * (exact * (2 * dim * 8 + 8) + 2 * 2 * dim * 8) + rows * (3 * 8 + budget * 4)
    for bits in (8, 4, 3, 2):
        token = 2 * (dim * bits // 8 + 2)
        assert bytes_of[bits] == layers * (rows * heads * budget * token + beside)
    assert bytes_of[None] == layers * rows * heads * budget * 2 * dim * 8
    assert bytes_of[8, None] == layers * (rows * heads * budget * (dim + 2 + dim * 8) + beside)


def test_nothing_in_full_precision_outlives_a_layer() -> None:
    """Between forwards there are codes, and no tensor as large as all keys."""
    _, cache, _, _ = filled()
    store = cache.layers[0].store
    assert isinstance(store, CodedStore)
    held = [part for part in vars(store).values() if isinstance(part, torch.Tensor)]
    assert all(part.dtype == torch.int32 for part in held), "positions alone"
    assert max(part.numel() for part in store.exact.tensors()) < cache.layers[0].keys.numel()


@pytest.mark.parametrize("bits", [5, 16, "5", True, 4.0, (4,), (4, 5), (4, 2, 8)])
def test_other_numbers_are_refused(bits: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="bits="):
        PagedEvictionCache(models.family_config("llama"), budget=24, block_size=4, bits=bits)


@pytest.mark.parametrize(("bits", "times"), [(8, 1.8), (4, 3.4), (2, 6.0)])
def test_how_many_times_the_tokens_fit(bits: int, times: float) -> None:
    """Into the bytes of 448 tokens in bfloat16, of a model with three KV heads of 64; the shares are said."""
    config = models.family_config("llama", num_key_value_heads=3, num_attention_heads=9, hidden_size=576, head_dim=64)
    sizes = []
    for budget, few in ((448, None), (16 * int(448 * times / 16), bits)):
        cache = PagedEvictionCache(config, budget=budget, bits=few)
        cache.early_initialization(1, 3, 64, torch.bfloat16, torch.device("meta"))
        sizes.append(cache.stats().storage_bytes)
    assert sizes[1] <= sizes[0]
