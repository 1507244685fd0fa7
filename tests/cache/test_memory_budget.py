"""A budget in bytes."""

import copy
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.naming.sizes import bytes_text, parse_bytes

#: A token of one row in one layer of the tiny llama: keys and values, 2 heads, 8 channels, float32.
TOKEN = 2 * 2 * 8 * 4


def make(model: Any, memory: int | None = None, **settings: Any) -> PagedEvictionCache:
    if memory is not None:
        settings["budget"] = f"{memory}B"
    return PagedEvictionCache(model.config, **{"block_size": 4, "policy": "keydiff", **settings})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        (" 3 kb ", 3000),
        ("0.5kib", 512),
        ("77B", 77),
        (4096, 4096),
    ],
)
def test_forms(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["900GiB", "2GiB", "3kB", "1500MB", "77B", "1025B"])
def test_bytes_come_back_as_they_were_given(text: str) -> None:
    count = parse_bytes(text)
    assert bytes_text(count) == text and parse_bytes(bytes_text(count)) == count


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "deepseek_v3",
        "gemma3",
        "falcon_h1",
        "qwen3_next",
    ],
)
def test_as_much_as_fits(family: str) -> None:
    """One block more in every layer would be too much; and the cache is that of so many tokens."""
    reason = models.unavailable(family)
    if reason:
        pytest.skip(reason)
    model, inputs = models.shared(family), modes.batch("greedy", True)
    policy = "keydiff" if family == "deepseek_v3" else "paged_eviction"
    by_tokens = make(model, budget=24, policy=policy)
    tokens = modes.run(model, by_tokens, "greedy", *inputs)
    stats = by_tokens.stats()
    block = stats.storage_bytes * 4 // 24
    for memory in (stats.storage_bytes, stats.storage_bytes + block - 1):
        cache = make(model, memory=memory, policy=policy)
        assert cache.budget is None
        assert cache.stats().budget is None
        assert torch.equal(modes.run(model, cache, "greedy", *inputs), tokens)
        assert (cache.budget, cache.stats().budget, cache.stats().storage_bytes) == (24, 24, stats.storage_bytes)
        assert cache.stats().other_bytes == stats.other_bytes
        assert "24 tokens (" in repr(cache)
    cache = make(model, memory=stats.storage_bytes - 1, policy=policy)
    modes.run(model, cache, "greedy", *inputs)
    assert cache.budget == 20


def test_precision_and_rows_count() -> None:
    model = models.build("llama").to(torch.bfloat16)
    ids, mask = modes.batch("greedy", False)
    cache = make(model, memory=2 * 3 * 24 * TOKEN)
    modes.generate(model, cache, ids, mask, 2)
    assert cache.budget == 48
    cache.reset()
    assert cache.budget is None
    modes.generate(model, cache, ids[:1], mask[:1], 2)
    assert cache.budget == 3 * 48


def test_beams_are_rows() -> None:
    model, inputs = models.shared("llama"), modes.batch("beam", True)
    cache = make(model, memory=2 * 9 * 24 * TOKEN)
    tokens = modes.run(model, cache, "beam", *inputs)
    assert cache.budget == 24
    assert torch.equal(tokens, modes.run(model, make(model, budget=24), "beam", *inputs))


def test_rows_that_come_later_come_on_top() -> None:
    model = models.shared("llama")
    cache = make(model, memory=2 * 24 * TOKEN)
    modes.forward(model, cache, *models.left_pad(models.prompts([40])), 0, 40)
    cache.batch_repeat_interleave(3)
    assert cache.budget == 24
    assert cache.stats().storage_bytes == 3 * 2 * 24 * TOKEN


def test_static() -> None:
    model, inputs = models.shared("llama"), modes.batch("two_turns", True)
    cache = make(model, memory=2 * 3 * 24 * TOKEN, static=True)
    tokens = modes.run(model, cache, "two_turns", *inputs)
    assert torch.equal(tokens, modes.run(model, make(model, budget=24), "two_turns", *inputs))
    assert cache.stats().storage_bytes == 2 * 3 * 24 * TOKEN


def test_pyramid_shares_out_the_same_bytes() -> None:
    model = models.shared("llama", "paged_eviction")
    alone = make(model, memory=2 * 24 * TOKEN + 100, allocator="pyramid")
    modes.run(model, alone, "greedy", *models.left_pad(models.prompts([40])))
    assert alone.budget == 24 and alone.stats().storage_bytes == 2 * 24 * TOKEN
    model, inputs = models.shared("llama", "paged_eviction"), modes.batch("greedy", True)
    cache, by_tokens = (
        make(model, memory=3 * (36 + 24) * TOKEN + 100, allocator="pyramid"),
        make(model, budget=24, allocator="pyramid"),
    )
    assert torch.equal(modes.run(model, cache, "greedy", *inputs), modes.run(model, by_tokens, "greedy", *inputs))
    assert cache.budget == 24
    assert cache.stats().storage_bytes <= 3 * (36 + 24) * TOKEN  # one row's first layer, another row's last
    assert [layer.budget for _, layer in cache.paged_layers] == [layer.budget for _, layer in by_tokens.paged_layers]


@pytest.mark.parametrize(("allocator", "heads"), [("cake", "shared"), ("ada_kv", "separate")])
def test_allocators_that_share_out_tokens(allocator: str, heads: str) -> None:
    with pytest.raises(ValueError, match=rf"{allocator}.*budget="):
        make(models.shared("llama", "paged_eviction"), budget="1MiB", allocator=allocator, heads=heads)


def test_too_little_says_how_much_it_takes() -> None:
    model, (ids, mask) = models.shared("llama"), modes.batch("greedy", False)
    least = 2 * 3 * 12 * TOKEN
    cache = make(model, memory=least - 1)
    with pytest.raises(ValueError, match=rf"3.*384.*{least:,}"):
        modes.generate(model, cache, ids, mask, 2)
    cache = make(model, memory=least)
    modes.generate(model, cache, ids, mask, 2)
    assert cache.budget == 12
    # The same prefix protected: more is needed.
    with pytest.raises(ValueError, match="20 are needed"):
        modes.generate(model, make(model, memory=least, sink_tokens=11), ids, mask, 2)


def test_a_wider_layer_later_is_refused() -> None:
    cache = make(models.shared("llama"), memory=2 * 24 * TOKEN)
    narrow, wide = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 16)
    cache.update(narrow, narrow, 0)
    with pytest.raises(ValueError, match=r"1.*256.*earlier"):
        cache.update(wide, wide, 1)
    cache.reset()
    cache.update(wide, wide, 0)
    cache.update(narrow, narrow, 1)
    assert cache.budget == 12


def test_storage_made_early() -> None:
    model = models.shared("llama")
    shape = {"batch_size": 3, "num_heads": 2, "head_dim": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    cache = make(model, memory=6 * 24 * TOKEN)
    cache.early_initialization(**{**shape, "batch_size": 1})
    assert cache.budget == 3 * 24
    modes.run(model, cache, "greedy", *modes.batch("greedy", True))
    assert cache.budget == 24  # what is fed counts, not what was announced
    assert cache.stats().storage_bytes == 6 * 24 * TOKEN


def test_copies_and_shrinking() -> None:
    model, (ids, mask) = models.shared("llama"), modes.batch("greedy", True)
    cache = make(model, memory=6 * 48 * TOKEN)
    twin = copy.deepcopy(cache)
    modes.generate(model, cache, ids, mask, 3)
    assert (cache.budget, twin.budget) == (48, None)
    with pytest.raises(ValueError, match=r"budget.*48"):
        cache.shrink(52)
    cache.shrink(24)
    cache.reset()
    assert cache.budget == 24
    modes.generate(model, cache, ids[:1], mask[:1], 3)
    assert cache.budget == 24  # in tokens from now on


def test_turned_keys_count() -> None:
    """With positions="cache" attention reads a turned copy of the keys, half as much again."""
    model, inputs = models.shared("llama"), modes.batch("greedy", True)
    cache = make(model, memory=2 * 3 * 24 * TOKEN * 3 // 2, positions="cache")
    modes.run(model, cache, "greedy", *inputs)
    assert cache.budget == 24
    assert cache.stats().storage_bytes == 2 * 3 * 24 * TOKEN * 3 // 2


@pytest.mark.parametrize("bits", [None, 4, (8, 3)], ids=str)
def test_heads_of_different_size_in_few_bits(bits: Any) -> None:
    """Whatever the longest head holds."""
    model, room = models.shared("llama", "paged_eviction"), 20_000 if bits is None else 14_000
    settings = {"policy": "kvzip", "allocator": "heads:[[1.6, 0.4], [0.8, 1.2]]", "bits": bits}
    cache = make(model, budget=f"{room}B", **settings)
    ids, mask = models.left_pad(models.prompts([70, 61]))
    modes.generate(model, cache, ids, mask, 20)
    held = cache.stats().storage_bytes
    limits = torch.cat([layer.table.limits for _, layer in cache.paged_layers])
    assert limits.max() > cache.budget, "a head holds more than its share"
    assert room - 4 * room // cache.budget < held <= room
