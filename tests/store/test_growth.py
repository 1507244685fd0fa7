"""Storage that grows with the text: never more than twice what is needed, and nobody notices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from coded_cases import rotary
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.store.coders import Plain
from hf_paged_eviction.store.store import Store
from same_state import same_state

LENGTH = 130


def text(rows: int = 2, padded: bool = False) -> tuple[Tensor, Tensor]:
    lengths = [LENGTH - 7 * row * padded for row in range(rows)]
    return models.left_pad(models.prompts(lengths, seed=6))


def feed(cache: Any, start: int, stop: int, padded: bool = False, rows: int = 2) -> Tensor:
    model = models.shared("llama", "paged_eviction")
    return modes.forward(model, cache, *text(rows, padded), start, stop)[:, -1:]


def decode(cache: Any, start: int, stop: int, padded: bool = False, rows: int = 2) -> Tensor:
    return torch.cat([feed(cache, at, at + 1, padded, rows) for at in range(start, stop)], dim=1)


def make(at_once: bool = False, **settings: Any) -> PagedEvictionCache:
    """`at_once`: the storage for the whole budget is made here."""
    model, settings = models.shared("llama", "paged_eviction"), {"budget": 96, "block_size": 4, **settings}
    cache = models.paged(model.config, **settings)
    for layer in cache.layers if at_once else ():
        layer.lazy_initialization(*torch.empty(2, 2, 2, 0, 8))
    return cache


def pair(**settings: Any) -> tuple[PagedEvictionCache, PagedEvictionCache]:
    return make(**settings), make(at_once=True, **settings)


def slots(cache: PagedEvictionCache) -> list[int]:
    assert all(layer.keys.shape[2] == layer.values.shape[2] for layer in cache.layers)
    return [layer.keys.shape[2] for layer in cache.layers]


def assert_fitting(cache: PagedEvictionCache) -> None:
    for layer in cache.layers:
        size, held = layer.budget.block_size, layer.held
        most = min(layer.budget.tokens, -(-2 * held // size) * size)
        assert held <= layer.keys.shape[2] <= most, f"{held} tokens in {layer.keys.shape[2]} slots"


@pytest.mark.parametrize(("block_size", "budget"), [(1, 48), (4, 48), (16, 48), (7, 49)])
@pytest.mark.parametrize("prompt", [1, 3, 15, 16, 17])
def test_between_what_is_needed_and_twice_that(prompt: int, block_size: int, budget: int) -> None:
    cache = make(budget=budget, block_size=block_size, sink_tokens=1)
    feed(cache, 0, prompt)
    moves, before = 0, slots(cache)[0]
    first = before
    for at in range(prompt, budget + 5):
        assert_fitting(cache)
        feed(cache, at, at + 1)
        moves, before = moves + (slots(cache)[0] != before), slots(cache)[0]
    assert slots(cache) == [budget] * 2
    assert moves <= math.ceil(math.log2(budget / first))


def test_unused_slots_are_never_seen() -> None:
    """What new storage holds does not matter: here it is NaN."""
    cache, whole = pair()
    for start, stop in [(0, 5), *((at, at + 1) for at in range(5, 60)), (60, 75), (75, 76), (76, 130)]:
        assert torch.equal(feed(cache, start, stop), feed(whole, start, stop))
        for one in (cache, whole):
            for layer in one.layers:
                for states in layer.store.read():
                    states[:, :, layer.held :] = math.nan


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_and_then_not(inside: bool) -> None:
    cache, whole = pair(policy="h2o")
    with torch.inference_mode(inside):
        logits = [torch.cat([feed(one, 0, 5), decode(one, 5, 30)], dim=1) for one in (cache, whole)]
    with torch.inference_mode(not inside):
        logits = [
            torch.cat([before, decode(one, 30, 105)], 1) for before, one in zip(logits, (cache, whole), strict=True)
        ]
    logits = [torch.cat([before, feed(one, 105, 130)], 1) for before, one in zip(logits, (cache, whole), strict=True)]
    assert torch.equal(*logits)
    same_state(cache, whole)


def test_reset_keeps_what_fits() -> None:
    cache, fresh = make(), make()
    feed(cache, 0, 30)
    address = [layer.keys.data_ptr() for layer in cache.layers]
    for prompt in (30, 10, 1):
        cache.reset()
        feed(cache, 0, prompt)
        assert [layer.keys.data_ptr() for layer in cache.layers] == address
    cache.reset()
    logits = [torch.cat([feed(one, 0, 60), decode(one, 60, 110)], dim=1) for one in (cache, fresh)]
    assert torch.equal(*logits)
    same_state(cache, fresh)
    cache.reset()
    feed(cache, 0, 9, rows=1)
    assert [len(layer.keys) for layer in cache.layers] == [1, 1]


def test_a_short_prompt_and_a_large_budget_cost_little() -> None:
    cache = make(budget=96 * 1024)
    feed(cache, 0, 30)
    assert slots(cache) == [32] * 2
    assert cache.stats().storage_bytes == 2 * 2 * 2 * 2 * 32 * 8 * 4  # layers, K and V, rows, heads, slots, dim, bytes


def test_a_share_of_the_prompt_is_the_most() -> None:
    cache = make(budget="50%")
    feed(cache, 0, 40)
    decode(cache, 40, 60)
    assert slots(cache) == [20] * 2


def test_rotated_keys_are_a_column_of_their_own() -> None:
    """Whoever changes keys and values in place changes these two; attention reads the third."""
    store, states = Store(Plain(rotary(8, "halves"))), torch.randn(2, 2, 3, 8)
    store.start(states, states, 4, 4)
    store.append(0, states, states)
    assert all(read is shown for read, shown in zip(store.read(), store.shown(), strict=True))
    store.turn(torch.full((2, 1, 4), 2))
    assert [tuple(part.shape) for part in store.tensors] == [(2, 2, 4, 8)] * 2
    (keys, values), (shown, same) = store.read(3), store.shown(3)
    assert torch.equal(keys, states) and torch.equal(values, same) and not torch.equal(keys, shown)
    store.clear()
    assert not store.turns and len(store.tensors) == 2
