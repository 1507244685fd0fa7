"""What holds for every option of a cache holds for disposals of the lab, too."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_fold import saved_kernels
from transformers import DynamicCache

import models
import modes
import rows
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_lab.demote import demoted_tokens
from tests.contract import test_a_step_waits_for_nothing as waits

OURS = "paged_eviction"
DISPOSALS = ["merge", "merge(values_only=True)", "demote", "fold"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=DISPOSALS)
def disposal(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "fold":
        return saved_kernels(folder, models.shared("llama", OURS).config, "recency")
    return str(request.param)


def cache_of(disposal: str, **options: Any) -> PagedEvictionCache:
    config = models.shared("llama", OURS).config
    return PagedEvictionCache(
        config, **{"budget": 16, "block_size": 4, "policy": "recency", **options}, disposal=disposal
    )


def test_a_row_is_what_it_is_alone(disposal: str) -> None:
    """Padded and in a batch, over a ragged second turn."""
    how = {"budget": 24, "block_size": 4, "policy": "recency", "heads": "separate", "disposal": disposal}
    assert rows.compare(models.shared("llama", OURS), [40, 33, 9], [10, 2, 6], **how) > 0


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_budget_that_holds_the_text_changes_no_bit(disposal: str, padded: bool) -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", padded)
    logits = []
    for cache in (DynamicCache(config=model.config), cache_of(disposal, budget=64)):
        spans = [(0, 20), *((at, at + 1) for at in range(20, 31)), (31, 40)]
        chunks = [modes.forward(model, cache, ids, mask, *span) for span in spans]
        logits.append(torch.cat(chunks, dim=1)[mask.bool()])
    assert torch.equal(*logits)
    assert cache.stats().evicted_tokens == demoted_tokens(cache) == 0


@pytest.mark.parametrize("first", [10, 37])
def test_a_saved_context_goes_on(disposal: str, first: int, tmp_path: Path) -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([49, 40, 31], seed=7))
    cache = cache_of(disposal)
    for span in ((0, min(first, 30)), *((at, at + 1) for at in range(30, first))):
        modes.forward(model, cache, ids, mask, *span)
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    for at in range(first, 49):
        logits = [modes.forward(model, one, ids, mask, at, at + 1)[mask[:, at].bool()] for one in (cache, loaded)]
        assert torch.equal(*logits), at


def test_a_model_in_bfloat16(disposal: str) -> None:
    model = models.build("llama", OURS)
    cache = cache_of(disposal)
    inputs = modes.batch("greedy", padded=True)
    modes.run(model, cache, "greedy", *inputs)
    model.to(torch.bfloat16)
    cache.reset()
    logits = [modes.run(model, one, "greedy", *inputs) for one in (cache, cache_of(disposal))]
    assert torch.equal(*logits)
    assert cache.paged_layers[0][1].dtype == torch.bfloat16


def test_a_pickled_cache_goes_on(disposal: str) -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([46, 30, 39]))
    cache = cache_of(disposal)
    for start, stop in ((0, 24), (24, 25), (25, 26)):
        modes.forward(model, cache, ids, mask, start, stop)
    twin = pickle.loads(pickle.dumps(cache))
    for at in range(26, 36):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits), at


def test_storage_is_free_with_the_cache(disposal: str) -> None:
    model = models.shared("llama", OURS)
    ids, mask = modes.batch("direct", padded=False)
    cache = cache_of(disposal)
    with torch.no_grad():
        modes.forward(model, cache, ids, mask, 0, 20)
        modes.forward(model, cache, ids, mask, 20, 21)
    held = [weakref.ref(states) for layer in cache.layers for states in (layer.keys, layer.values)]
    held += [weakref.ref(layer) for layer in cache.layers]
    del cache
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.parametrize("policy", ["keydiff", "h2o", "recency"])
@pytest.mark.parametrize("way", ["merge", "merge(values_only=True)", "fold"])
def test_no_step_waits(way: str, policy: str, folder: Path) -> None:
    """Merging and folding are queued."""
    disposal = saved_kernels(folder, waits.CONFIG, policy) if way == "fold" else way
    check = waits.check_steps_on_cuda if torch.cuda.is_available() else waits.check_steps
    check({"disposal": disposal, "policy": policy, "heads": "shared" if way == "merge" else "separate"})


def test_refused(disposal: str) -> None:
    for options, message in (({"bits": 4}, "bits="), ({"static": True}, "static=True")):
        with pytest.raises(ValueError, match=message):
            cache_of(disposal, **options)
    if disposal != "merge":
        with pytest.raises(ValueError, match=r"attention"):
            models.paged(models.shared("llama").config, 24, 4, disposal=disposal, policy="recency")
    if models.unavailable("deepseek_v3") is None:
        with pytest.raises(ValueError, match="caches latents"):
            models.paged(models.family_config("deepseek_v3"), 24, 4, policy="keydiff", disposal=disposal)
