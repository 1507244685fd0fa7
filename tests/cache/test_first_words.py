"""What a user meets first: defaults that work everywhere, and messages that carry the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import modes
from evicting import check
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_nothing_but_a_budget_on_latents(padded: bool) -> None:
    """The norms that decide elsewhere say nothing of latents."""
    model = models.shared("deepseek_v3")
    assert PagedEvictionCache(model.config, budget=64).policy.name == "keydiff"
    assert "policy=keydiff" in repr(PagedEvictionCache(model.config, budget=64))
    check("deepseek_v3", "sdpa", "direct", padded, policy="auto")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("policy", ["expected_attention", "compactor"])
def test_the_line_that_fixes_it(policy: str, family: str) -> None:
    config = models.shared(family).config
    if family == "deepseek_v3":
        with pytest.raises(ValueError, match="'keydiff'"):
            PagedEvictionCache(config, budget=64, policy=policy)
        return
    with pytest.raises(ValueError, match=r"uses 'sdpa'") as error:
        PagedEvictionCache(config, budget=64, policy=policy)
    assert "    model.set_attn_implementation('paged_eviction')" in str(error.value).splitlines()


def test_a_list_of_the_wrong_length_before_anything_else() -> None:
    with pytest.raises(ValueError, match=r"1 budgets.*2"):
        PagedEvictionCache(models.shared("llama").config, budget=[64])


def test_generate_without_a_cache() -> None:
    """Of a batch without pads the cache is shown no mask, here as with `DynamicCache`."""
    model = models.shared("llama")
    ids, mask = modes.batch("greedy", True)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    with pytest.raises(ValueError, match=r"41.*use_cache=False.*cache\.reset\(\)"):
        modes.generate(model, cache, ids, mask, 3, use_cache=False)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "falcon_h1", "zamba2"])
@pytest.mark.parametrize("forget", ["reset", "release"])
def test_another_number_of_rows(family: str, forget: str) -> None:
    """Linear states of the last batch do not stand in the way of the next."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family)
    used, fresh = (PagedEvictionCache(model.config, budget=24, block_size=4) for _ in "ab")
    for lengths in ([30], [40, 33, 9], [21, 17]):
        ids, mask = models.left_pad(models.prompts(lengths, seed=len(lengths)))
        stop = ids.shape[1]
        for start, end in ((0, stop - 5), *((at, at + 1) for at in range(stop - 5, stop))):
            logits: list[Any] = [modes.forward(model, one, ids, mask, start, end) for one in (used, fresh)]
            assert torch.equal(*logits)
        getattr(used, forget)()
        fresh = PagedEvictionCache(model.config, budget=24, block_size=4)
