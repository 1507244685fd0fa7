"""Delayed attention against lists, full attention where memories hold everything, and each row as if alone."""

from __future__ import annotations

import pytest
import torch
from slow_delay import delayed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_paged_eviction_lab.query_memory.delayed import delayed_attention

#: chunk, queries, keys
SIZES = [(1, 0, 3), (4, 0, 8), (4, 3, 6), (5, 7, 12), (3, 1, 2), (40, 2, 9)]


def states(rows: int, count: int, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, count, 8), (rows, kv_heads, count, 8), (rows, kv_heads, count, 8)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return 2 * query, key, value


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("evict", ["fifo", "lra", "lfa"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_what_lists_say(size: tuple[int, int, int], evict: str, heads: tuple[int, int], padded: bool) -> None:
    chunk, queries, keys = size
    query, key, value = states(3, 23, *heads)
    real = None
    if padded:
        real = torch.ones(3, 23, dtype=torch.bool)
        real[0, :9] = False  # on the left
        real[1, 14:] = False  # on the right
        real[1, 3:5] = False
    output = delayed_attention(query, key, value, chunk=chunk, queries=queries, keys=keys, evict=evict, real=real)
    expected = delayed(query, key, value, chunk, queries, keys, evict, real)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("evict", ["fifo", "lra", "lfa"])
def test_memories_as_long_as_the_text_are_full_attention(evict: str) -> None:
    query, key, value = states(2, 30)
    output = delayed_attention(query, key, value, chunk=7, queries=30, keys=31, evict=evict)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_a_query_sees_so_many_tokens_after_it_and_none_more() -> None:
    query, key, value = states(1, 24)
    settings = {"chunk": 1, "queries": 5, "keys": 24}
    before = delayed_attention(query, key, value, **settings)
    value[:, :, 12] += 1
    changed = (delayed_attention(query, key, value, **settings) - before).abs().amax((0, 1, 3)) > 1e-4
    assert changed.tolist() == [at >= 12 - 5 for at in range(24)]


@pytest.mark.parametrize("evict", ["fifo", "lra", "lfa"])
def test_a_row_does_not_depend_on_its_batch(evict: str) -> None:
    lengths, count = [23, 16, 4, 1], 23
    query, key, value = states(4, count)
    real = torch.arange(count) >= count - torch.tensor(lengths)[:, None]
    poisoned = [torch.where(real[:, None, :, None], states, 1e4) for states in (query, key, value)]
    together = delayed_attention(*poisoned, chunk=5, queries=4, keys=7, evict=evict, real=real)
    for row, length in enumerate(lengths):
        alone = [states[row : row + 1, :, count - length :] for states in (query, key, value)]
        own = delayed_attention(*alone, chunk=5, queries=4, keys=7, evict=evict)
        torch.testing.assert_close(together[row : row + 1, :, count - length :], own, rtol=1e-5, atol=1e-5)
        assert not together[row, :, : count - length].any()


def test_a_row_of_pads_harms_nobody() -> None:
    query, key, value = states(2, 9)
    real = torch.tensor([[False] * 9, [True] * 9])
    output = delayed_attention(query, key, value, chunk=4, queries=2, keys=5, real=real)
    assert output.isfinite().all()
    own = delayed_attention(query[1:], key[1:], value[1:], chunk=4, queries=2, keys=5)
    torch.testing.assert_close(output[1:], own)
