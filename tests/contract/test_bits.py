"""`bits=`: scores, bytes, copies and compiled steps; logits of rounded tokens are compared in tests/fuzz."""

import copy
import functools
from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.store.columns import gather_slots
from hf_paged_eviction.store.store import Store

pytestmark = pytest.mark.contract


@functools.cache
def shared(family: str, *attention: str) -> Any:
    """In double precision a step of the rounding is hardly ever taken for the noise of the last digit."""
    return models.build(family, *attention).double()


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


def filled(
    steps: int = 7, *attention: str, **settings: Any
) -> tuple[Any, PagedEvictionCache, torch.Tensor, torch.Tensor]:
    model = shared("llama", *attention)
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, "bits": 4, **settings})
    ids, mask = models.left_pad(models.prompts([50, 38], seed=1))
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 30 + steps))]:
        modes.forward(model, cache, ids, mask, start, stop)
    return model, cache, ids, mask


def go_on(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, start: int = 37) -> torch.Tensor:
    steps = [modes.forward(model, cache, ids, mask, at, at + 1)[:, -1] for at in range(start, ids.shape[1])]
    return torch.stack(steps)


@pytest.mark.parametrize("allocator", ["uniform", "ada_kv"])
def test_of_a_prompt_only_what_stays_is_encoded(allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gets the codes that it would get among all tokens."""
    encode, encoded = Codec.encode, []

    def counted(self: Codec, states: torch.Tensor, *more: Any) -> Any:
        encoded.append(states.shape[2])
        return encode(self, states, *more)

    monkeypatch.setattr(Codec, "encode", counted)
    options = {"policy": "keydiff", "allocator": allocator}
    few = filled(0, "paged_eviction", **options)[1]
    assert encoded and max(encoded) <= max(layer.state.table.capacity for layer in few.layers) < 30
    monkeypatch.setattr(Store, "keep", _keep_of_all)
    for layer, other in zip(few.layers, filled(0, "paged_eviction", **options)[1].layers, strict=True):
        live = layer.positions.expand(-1, 2, -1) >= 0
        assert torch.equal(layer.positions, other.positions)
        for states, expected in zip(layer.state.store.read(), other.state.store.read(), strict=True):
            assert torch.equal(states[live], expected[live])


def _keep_of_all(self: Store, keys: Any, values: Any, kept: Any, held: int, arrived: Any, views: bool) -> None:
    """`Store.keep` of a first prompt, which encodes all tokens."""
    self.columns.take(self._encoded(keys, values, arrived.new), kept, views, arrived.limits)

    def states(slots: torch.Tensor) -> Any:
        place = kept.expand(-1, slots.shape[1], -1).gather(-1, slots)
        return gather_slots(keys, place), gather_slots(values, place)

    self.exact.find(arrived.positions, arrived.count, states)


@pytest.mark.parametrize("static", [False, True])
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
    for forget in (cache.reset, cache.release):
        forget()
        assert forget == cache.reset or cache.stats().storage_bytes == 0
        for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 37))]:
            modes.forward(model, cache, ids, mask, start, stop)
        assert torch.equal(go_on(model, cache, ids, mask), expected)


def test_a_budget_in_bytes() -> None:
    """As many tokens as fit beside those that are not rounded, and not one block more."""
    tokens = {}
    for bits in (None, 8, 2):
        cache = filled(budget="16KiB", bits=bits, policy="keydiff")[1]
        tokens[bits] = cache.stats().budget
        assert cache.stats().storage_bytes <= 16 * 1024
        more = PagedEvictionCache(shared("llama").config, tokens[bits] + 4, 4, "keydiff", bits=bits)
        for layer in more.layers:
            layer.lazy_initialization(*torch.empty(2, 2, 2, 0, 8, dtype=torch.float64))
        assert more.stats().storage_bytes > 16 * 1024
    assert tokens[None] < tokens[8] < tokens[2]
    with pytest.raises(ValueError, match="not rounded"):
        filled(budget="2500B", policy="keydiff")


def test_bytes() -> None:
    """Budget and stats count tokens as ever; the bytes are those of the tensors there are."""
    bytes_of = {}
    for bits in (None, 8, 4, 3, 2, (8, 4)):
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
    assert bytes_of[8, 4] == layers * (rows * heads * budget * (dim + dim // 2 + 4) + beside)


def test_nothing_in_full_precision_outlives_a_layer() -> None:
    """Between forwards there are codes, and no tensor as large as all keys."""
    _, cache, _, _ = filled()
    store = cache.layers[0].store
    assert store.rounds
    held = [part for part in vars(store).values() if isinstance(part, torch.Tensor)]
    assert all(part.dtype == torch.int32 for part in held), "positions alone"
    assert max(part.numel() for part in store.exact.tensors()) < cache.layers[0].keys.numel()


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
