"""Storage that requests hand on to each other."""

from __future__ import annotations

import copy
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache, StoragePool
from same_state import same_state

STATIC = [False, pytest.param(True, marks=models.needs_514)]
BYTES = 2 * 2 * 3 * 2 * 24 * 8 * 4  # layers, K and V, rows, heads, slots, dim, bytes


def make(pool: StoragePool | None, **settings: Any) -> PagedEvictionCache:
    model = models.shared("llama", "paged_eviction")
    return PagedEvictionCache(model.config, pool=pool, **{"budget": 24, "block_size": 4, **settings})


def serve(cache: Any, seed: int = 0, rows: int = 3, steps: int = 6, **how: Any) -> Tensor:
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([40, 33, 9][:rows], seed=seed))
    return modes.generate(model, cache, ids, mask, steps, **how)


def tensors(cache: Any) -> list[Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def addresses(cache: Any) -> list[int]:
    return [states.data_ptr() for states in tensors(cache)]


@pytest.mark.parametrize("static", STATIC)
def test_the_same_tensors_in_the_same_layers(static: bool) -> None:
    pool = StoragePool()
    seen = []
    for seed in range(2):
        cache = make(pool, static=static)
        assert torch.equal(serve(cache, seed), serve(make(None, static=static), seed))
        assert (pool.taken_bytes, pool.free_bytes) == (BYTES, 0)
        seen.append(addresses(cache))
        cache.release()
        assert (pool.taken_bytes, pool.free_bytes) == (0, BYTES)
        assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    assert len(set(map(tuple, seen))) == 1


@pytest.mark.parametrize("policy", ["paged_eviction", "h2o"])
@pytest.mark.parametrize("static", STATIC)
def test_what_another_request_left_is_never_seen(static: bool, policy: str) -> None:
    pool = StoragePool()
    first = make(pool, static=static, policy=policy)
    serve(first)
    left = tensors(first)
    first.release()
    for states in left:
        states.fill_(math.nan)
    second, fresh = make(pool, static=static, policy=policy), make(None, policy=policy)
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([60, 57, 53], seed=3))
    for start, stop in [(0, 9), *((at, at + 1) for at in range(9, 40)), (40, 47), (47, 48)]:
        ours, expected = (modes.forward(model, cache, ids, mask, start, stop) for cache in (second, fresh))
        real = mask[:, start:stop].bool()
        assert_close(ours[real], expected[real])
    assert set(addresses(second)) == {states.data_ptr() for states in left}
    same_state(fresh, second)


def test_no_tensor_in_two_caches() -> None:
    pool = StoragePool()
    alive = [make(pool) for _ in range(3)]
    for seed, cache in enumerate(alive):
        serve(cache, seed, steps=3)
    alive.pop(1).release()
    alive += [make(pool), make(pool)]
    for seed, cache in enumerate(alive):
        cache.reset()
        serve(cache, seed, steps=3)
    every = [address for cache in alive for address in addresses(cache)]
    assert len(every) == len(set(every))


def test_release_twice_and_use_again() -> None:
    pool = StoragePool()
    cache = make(pool)
    cache.release()
    expected = serve(make(None))
    for _ in range(2):
        assert torch.equal(serve(cache), expected)
        cache.release()
        cache.release()
        assert cache.get_seq_length() == 0
        assert (pool.taken_bytes, pool.free_bytes) == (0, BYTES)
    one, other = make(pool), make(pool)
    serve(one)
    serve(other, seed=1)
    assert not set(addresses(one)) & set(addresses(other))


def test_a_forgotten_cache_leaks_nothing() -> None:
    pool = StoragePool()
    cache = make(pool)
    serve(cache)
    assert pool.taken_bytes == BYTES
    del cache
    gc.collect()
    assert (pool.taken_bytes, pool.free_bytes) == (0, 0)


def test_foreign_tensors_are_left_alone() -> None:
    pool, other = StoragePool(), StoragePool()
    mine = pool.take((2, 3), torch.float32, torch.device("cpu"))
    other.give(mine)
    pool.give(torch.ones(2, 3), mine[:1], mine.view(3, 2))
    assert (pool.free_bytes, other.free_bytes) == (0, 0)
    pool.give(mine)
    pool.give(mine)
    assert pool.free_bytes == 24
    pool.clear()
    assert pool.free_bytes == 0


def test_shapes_and_types_do_not_mix() -> None:
    pool = StoragePool()
    caches = [make(pool), make(pool), make(pool, budget=32)]
    serve(caches[0])
    serve(caches[1], rows=2)
    serve(caches[2])
    shapes = [tuple(cache.layers[0].keys.shape) for cache in caches]
    assert shapes == [(3, 2, 24, 8), (2, 2, 24, 8), (3, 2, 32, 8)]
    for cache in caches:
        cache.release()
    half = pool.take((3, 2, 24, 8), torch.float16, torch.device("cpu"))
    assert half.dtype == torch.float16
    again = make(pool, budget=32)
    assert torch.equal(serve(again), serve(make(None, budget=32)))


@pytest.mark.parametrize("static", STATIC)
def test_a_copy_has_tensors_of_its_own(static: bool) -> None:
    pool = StoragePool()
    cache = make(pool, static=static)
    serve(cache)
    other = copy.deepcopy(cache)
    assert other.pool is pool
    assert not set(addresses(cache)) & set(addresses(other))
    other.release()
    assert (pool.taken_bytes, pool.free_bytes) == (BYTES, 0)
    cache.release()
    assert pool.free_bytes == BYTES


@pytest.mark.parametrize("static", STATIC)
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_rows_that_change(static: bool, how: dict[str, Any]) -> None:
    """Indexed rows are copies: what goes back to the pool is not what the cache goes on with."""
    pool = StoragePool()
    for seed in range(2):
        cache, waiting = make(pool, static=static), make(pool)
        expected = serve(make(None), seed, **how)
        ours = serve(cache, seed, **how)
        serve(waiting, seed, rows=3, **how)
        assert torch.equal(ours, expected)
        assert not set(addresses(cache)) & set(addresses(waiting))
        free = [states.data_ptr() for queue in pool._free.values() for states in queue]
        assert not set(addresses(cache) + addresses(waiting)) & set(free)
        cache.release()
        waiting.release()


def test_repeating_once_is_a_copy_too() -> None:
    pool = StoragePool()
    cache, other = make(pool), make(pool)
    serve(cache)
    cache.batch_repeat_interleave(1)
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    serve(other, seed=1)
    assert not set(addresses(cache)) & set(addresses(other))


@pytest.mark.parametrize("allocator", ["cake", "ada_kv"])
def test_unequal_layers_bring_back_what_they_outgrow(allocator: str) -> None:
    """Where heads differ, tensors are of any size: no pool could hand them on."""
    pool = StoragePool()
    settings = {"allocator": allocator, "heads": "separate", "policy": "snapkv"}
    for seed in range(3):
        cache = make(pool, **settings)
        assert torch.equal(serve(cache, seed), serve(make(None, **settings), seed))
        assert pool.taken_bytes == 0
        cache.release()
        assert pool.taken_bytes == 0


def test_shrink_brings_back_the_larger_storage() -> None:
    pool = StoragePool()
    cache = make(pool)
    serve(cache)
    cache.shrink(16)
    assert (pool.taken_bytes, pool.free_bytes) == (BYTES * 16 // 24, BYTES)


def test_threads() -> None:
    pool, expected = StoragePool(), [serve(make(None), seed) for seed in range(4)]

    def work(number: int) -> bool:
        for turn in range(3):
            cache = make(pool)
            same = torch.equal(serve(cache, (number + turn) % 4), expected[(number + turn) % 4])
            assert pool.taken_bytes >= BYTES
            cache.release()
            if not same:
                return False
        return True

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(work, range(8)))
    assert pool.taken_bytes == 0
    assert BYTES <= pool.free_bytes <= 4 * BYTES


SHAPE: dict[str, Any] = {"batch_size": 3, "num_heads": 2, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize("static", STATIC)
def test_reserve(static: bool) -> None:
    pool = StoragePool()
    pool.reserve(lambda: make(pool, static=static), 2, **SHAPE)
    assert (pool.taken_bytes, pool.free_bytes) == (0, 2 * BYTES)
    first, second = make(pool, static=static), make(pool, static=static)
    serve(first)
    assert pool.free_bytes == BYTES
    serve(second, 1)
    assert (pool.taken_bytes, pool.free_bytes) == (2 * BYTES, 0)


def test_reserve_refuses() -> None:
    pool = StoragePool()
    with pytest.raises(ValueError, match="pool="):
        pool.reserve(lambda: make(None), 1, **SHAPE)
    with pytest.raises(ValueError, match="budget="):
        pool.reserve(lambda: make(pool, budget="50%"), 1, **SHAPE)


@pytest.mark.parametrize("static", STATIC)
def test_early_initialization(static: bool) -> None:
    """The whole budget at once, without a pool too; the first forward uses it."""
    cache = make(None, static=static)
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    before = addresses(cache)
    assert cache.stats().storage_bytes == BYTES
    assert cache.get_seq_length() == 0
    assert torch.equal(serve(cache), serve(make(None)))
    assert addresses(cache) == before


def test_early_initialization_for_another_batch_is_made_again() -> None:
    cache = make(None)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    assert torch.equal(serve(cache), serve(make(None)))
