"""A saved context under recall goes on as the one that was saved, and takes no file that does not fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_lab.recall import traffic

OURS = "paged_eviction"
ONE: dict[str, Any] = {"budget": 24, "block_size": 4, "policy": "keydiff", "disposal": "recall(blocks=2)"}


def fed(spans: list[int], **settings: Any) -> tuple[Any, PagedEvictionCache, torch.Tensor, torch.Tensor, int]:
    """A cache that has read forwards of so many tokens, padded; and the text, with more to come."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([60, 51, 20], seed=3))
    cache, at = PagedEvictionCache(model.config, **{**ONE, **settings}), 0
    for count in spans:
        modes.forward(model, cache, ids, mask, at, at + count)
        at += count
    more = torch.stack(models.prompts([30] * 3, seed=7))
    return model, cache, torch.cat([ids[:, :at], more], dim=1), modes.extend(mask[:, :at], 30), at


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "nothing has left": ([17, 1, 1], {}),
    "looked at": ([17, 1, 1], {"disposal": "recall(blocks=1, keep=.3)"}),
    "prompt": ([60], {"heads": "separate"}),
    "decoding": ([45, 1, 1, 1, 1, 1, 1], {"disposal": "recall(blocks=2, prefetch=2)"}),
    "chunks": ([30, 7, 9, 1], {"disposal": "recall(blocks=2, layers=2, every=3)", "policy": "paged_eviction"}),
    "all": ([40, 1, 1], {"disposal": "recall(blocks=all)"}),
    "vector": ([50, 1, 1], {"disposal": "recall(blocks=2, summary=vector, keep=.5)"}),
}


@pytest.mark.parametrize("case", CASES)
def test_goes_on(tmp_path: Path, case: str) -> None:
    """Single tokens, a question, more single tokens: no bit differs, and as many blocks come back."""
    spans, settings = CASES[case]
    model, cache, ids, mask, at = fed(spans, **settings)
    before, before_moved = cache.stats(), traffic(cache)
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    after, after_moved = loaded.stats(), traffic(loaded)
    assert (after_moved.faults, after.evicted_tokens) == (before_moved.faults, before.evicted_tokens)
    assert after_moved.host_bytes <= before_moved.host_bytes and after.summary_bytes <= before.summary_bytes
    assert (after_moved.host_bytes > 0) == (before_moved.host_bytes > 0)
    for count in (1, 1, 1, 1, 1, 8, 1, 1, 1):
        logits = [modes.forward(model, one, ids, mask, at, at + count) for one in (cache, loaded)]
        assert torch.equal(*logits)
        at += count
    assert traffic(loaded).faults == traffic(cache).faults
    assert traffic(loaded).faults > before_moved.faults or "all" in case
    assert cache.stats().evicted_tokens > before.evicted_tokens


def test_one_context_serves_several_questions(tmp_path: Path) -> None:
    """Rows are repeated after loading, then asked for anew, and every row says what it says alone."""
    model, cache, ids, mask, at = fed([48, 1, 1])
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    twin = copy.deepcopy(cache)
    loaded.batch_repeat_interleave(2)
    order = torch.tensor([0, 0, 1, 1, 2, 2])
    for step in range(6):
        logits = modes.forward(model, loaded, ids[order], mask[order], at + step, at + step + 1)
        own = modes.forward(model, twin, ids, mask, at + step, at + step + 1)
        assert_close(logits, own[order])
    loaded.batch_select_indices(torch.tensor([3, 0]))
    order = order[[3, 0]]
    for step in range(6, 10):
        logits = modes.forward(model, loaded, ids[order], mask[order], at + step, at + step + 1)
        own = modes.forward(model, twin, ids, mask, at + step, at + step + 1)
        assert_close(logits, own[order])


def test_blocks_that_are_missing_are_refused(tmp_path: Path) -> None:
    model, cache, *_ = fed([45, 1, 1, 1])
    path = tmp_path / "context.safetensors"
    cache.paged_layers[1][1].action.archive.stored += 99
    cache.save(path)
    with pytest.raises(ValueError, match="stored has numbers outside"):
        PagedEvictionCache.load(path, model.config)


def test_the_file_names_its_tensors(tmp_path: Path) -> None:
    _, cache, *_ = fed([45, 1])
    cache.save(tmp_path / "context.safetensors")
    names = set(load_file(tmp_path / "context.safetensors"))
    action = "state.layers.0.paged.action.stored"
    assert {f"{action}.{name}" for name in ("states", "high", "low", "stored", "due")} <= names
    with safe_open(tmp_path / "context.safetensors", "pt") as file:
        assert file.get_tensor(f"{action}.states").shape == (3, 2, 11, 4, 16)
