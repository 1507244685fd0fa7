"""A share of memory is one of the bytes that the prompt takes in 16 bits, whatever the model's dtype."""

import copy
import warnings
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.naming.sizes import parse_memory_share

LENGTH = 512


def read(cache: PagedEvictionCache, model: Any, rows: int = 1) -> int:
    """Read a prompt; returns the bytes of its keys and values in 16 bits."""
    ids = torch.randint(3, 99, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    model(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache})
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return 2 * 2 * rows * LENGTH * config.num_hidden_layers * config.num_key_value_heads * width


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1 / 8), (torch.bfloat16, 1 / 4)])
@torch.inference_mode()
def test_it_counts_16_bits_in_every_dtype(dtype: torch.dtype, share: float) -> None:
    model = copy.deepcopy(models.shared("llama")).to(dtype)
    cache = PagedEvictionCache(model.config, "25% of memory", policy="keydiff")
    assert cache.budget is None and "25% of memory" in repr(cache)
    full = read(cache, model)
    assert cache.budget == share * LENGTH
    assert cache.stats().storage_bytes == full // 4
    assert "25% of memory" in repr(cache)


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_few_bits_hold_more_tokens_of_it(rows: int) -> None:
    model = models.build("llama", hidden_size=128, head_dim=32)
    cache = PagedEvictionCache(model.config, " 50 %  OF memory", policy="keydiff", bits=8)
    full = read(cache, model, rows)
    assert (cache.budget or 0) > LENGTH / 4
    assert 0.4 * full < cache.stats().storage_bytes <= full / 2


@torch.inference_mode()
def test_a_saved_cache_holds_what_the_share_came_to(tmp_path: Any) -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, "50% of memory", policy="keydiff")
    read(cache, model)
    cache.save(tmp_path / "c.safetensors")
    assert PagedEvictionCache.load(tmp_path / "c.safetensors", model.config).budget == cache.budget == LENGTH // 4


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_of_a_length_that_is_named_it_needs_no_whole_prompt(rows: int) -> None:
    """Nor any tokens, to make the storage."""
    model = models.shared("llama")
    whole, chunk, storage = (
        PagedEvictionCache(model.config, f"50% of memory{length}", policy="keydiff")
        for length in ("", f" of  {2 * LENGTH} TOKENS", f" of {LENGTH} tokens")
    )
    read(whole, model, rows)
    read(chunk, model, rows)
    assert chunk.budget == 2 * (whole.budget or 0)
    assert f"50% of memory of {2 * LENGTH} tokens" in repr(chunk)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The budget is")
        model(torch.full((rows, LENGTH), 5), **{CACHE_ARGUMENT: chunk})
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    storage.early_initialization(rows, config.num_key_value_heads, width, torch.float32, torch.device("cpu"))
    assert storage.budget == whole.budget


@pytest.mark.parametrize("text", ["25% of memory of tokens", "25% of memory of 0 tokens", "25% of memory of 8k tokens"])
def test_a_length_is_a_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="of memory of 8192 tokens"):
        parse_memory_share(text)


def test_other_budgets_speak_of_no_memory() -> None:
    assert [parse_memory_share(text) for text in ("25%", "1024", "2GiB", " 12.5 % ")] == [None] * 4


@torch.inference_mode()
def test_a_first_chunk_is_not_the_prompt() -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, "50% of memory", policy="keydiff")
    read(cache, model)
    with pytest.warns(UserWarning, match=r"50% of memory.*give the budget in tokens"):
        model(torch.full((1, LENGTH), 5), **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize("budget", ["25% of memory", "0.5% of memory of 8192 tokens", "1% of memory"])
@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_of_a_short_prompt_it_is_the_smallest_budget(rows: int, budget: str) -> None:
    """As a share of its tokens is; of bytes as a number, and of spans that must stay, the way out is told."""
    model = models.shared("llama")
    ids, settings = torch.full((rows, 35), 5), {"policy": "keydiff", "block_size": 16}
    cache = PagedEvictionCache(model.config, budget, **settings)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, **{CACHE_ARGUMENT: cache}
    )
    assert cache.budget == 48
    bytes_ = PagedEvictionCache(model.config, "1KiB", **settings)
    with pytest.raises(ValueError, match=r"^budget='1KiB' is too small"):
        model(ids, **{CACHE_ARGUMENT: bytes_})
    protecting = PagedEvictionCache(model.config, budget, **settings, protect=[(3, 20)])
    with pytest.raises(ValueError, match=rf"^budget='{budget}' .*protect=.*Give a larger share"):
        model(ids, **{CACHE_ARGUMENT: protecting})


def test_tensors_without_tokens_are_no_prompt() -> None:
    cache = PagedEvictionCache(models.family_config("llama"), "50% of memory", policy="keydiff")
    empty = torch.zeros(1, 2, 0, 8)
    with pytest.raises(ValueError, match="needs a prompt"):
        cache.layers[0].lazy_initialization(empty, empty)
