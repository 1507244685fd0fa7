"""Spans of tokens that are never evicted; tests/fuzz draws them with every other option and between turns."""

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
#: In the middle of the prompt, at its end and beyond, and among what is generated.
SPANS = [(9, 14), (38, 42), (45, 47)]


def made(model: Any, budget: Any = 56, block_size: int = 4, **settings: Any) -> PagedEvictionCache:
    return models.paged(model.config, budget=budget, block_size=block_size, **settings)


def holds(cache: Any, row: int, spans: list[tuple[int, int]], seen: int) -> bool:
    named = {at for span in spans for at in range(*span) if at < seen}
    return all(named <= set(head) for _, layer in cache.paged_layers for head in layer.positions[row].tolist())


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_never_leave_a_share_of_the_prompt(padded: bool) -> None:
    """While the prompt overflows, and while more single tokens come than the budget has slots."""
    model = models.shared("llama")
    cache = made(model, "90%", policy="key_norm", protect=SPANS)
    ids, mask = models.left_pad(models.prompts([70, 58] if padded else [70, 70], seed=1))
    more = torch.stack(models.prompts([70] * 2, seed=3))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, more.shape[1])
    for start, stop in pairwise([0, *range(70, 141)]):
        modes.forward(model, cache, ids, mask, start, stop)
        for row in range(2):
            assert holds(cache, row, SPANS, int(mask[row, :stop].sum()))
    assert cache.stats().evicted_tokens


def test_rows_move_with_their_spans(tmp_path: Path) -> None:
    """Beams, selection, and a context that is saved when rows have moved."""
    model = models.shared("llama", OURS)
    spans = [[(3, 8)], [(20, 25)]]
    cache = made(model, 24, protect=spans)
    ids, mask = models.left_pad(models.prompts([40, 33]))
    modes.forward(model, cache, ids, mask, 0, 40)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1]))
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config, device=model.device)
    ids, mask = ids[[1, 0, 0]], mask[[1, 0, 0]]
    ids, mask = torch.cat([ids, ids], dim=1), modes.extend(mask, 40)
    for one in (cache, loaded):
        for at in range(40, 80):
            modes.forward(model, one, ids, mask, at, at + 1)
        assert [holds(one, row, spans[own], 80) for row, own in enumerate((1, 0, 0))] == [True] * 3
        assert not holds(one, 0, spans[0], 80)


def test_beams_share_the_spans_of_their_prompt() -> None:
    model = models.shared("llama")
    cache = made(model, 24, protect=[[(3, 8)], [(20, 25)]])
    ids, mask = models.left_pad(models.prompts([40, 33]))
    model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=30, num_beams=3, do_sample=False)
    for row in range(6):
        assert holds(cache, row, [(3, 8)] if row < 3 else [(20, 25)], 60)


def test_what_was_evicted_before_is_told() -> None:
    model = models.shared("llama")
    cache = made(model, 28, policy="recency")
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    with pytest.warns(UserWarning, match=r"3.*evicted"):
        cache.protect([(9, 12), (30, 34)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.protect([(30, 34), (90, 94)])


def test_a_budget_too_small_is_refused_with_the_numbers() -> None:
    config = models.shared("llama").config
    with pytest.raises(ValueError, match=r"21.*protect=\[\(9.*30\)\].*8.*40"):
        PagedEvictionCache(config, 24, 4, "paged_eviction", protect=[(9, 30)])
    PagedEvictionCache(config, 40, 4, "paged_eviction", protect=[(9, 30)])
    with pytest.raises(ValueError, match=r"Smallest.*16"):  # the start of the text is cut into no more
        PagedEvictionCache(config, 12, 4, "paged_eviction", sink_tokens=0, protect=[(0, 8)])
    cache = PagedEvictionCache(config, "20%", 4, "paged_eviction", protect=[(9, 30)])
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([60]))
    with pytest.raises(ValueError, match=r"budget='20%'.*60.*12.*40"):
        modes.forward(model, cache, ids, mask, 0, 60)
    cache = made(model, 24)
    modes.forward(model, cache, ids, mask, 0, 60)
    before = cache.block_table().clone()
    with pytest.raises(ValueError, match=r"Smallest.*40"):
        cache.protect([(9, 30)])
    assert torch.equal(before, cache.block_table())
    larger = made(model, 40, protect=[(9, 30)])
    modes.forward(model, larger, ids, mask, 0, 60)
    with pytest.raises(ValueError, match=r"Smallest.*40"):
        larger.shrink(36)


def test_what_does_not_go_together_is_refused() -> None:
    model = models.shared("llama", OURS)
    with pytest.raises(ValueError, match=r"protect=.*2.*'pyramid'"):
        made(model, protect=[[(1, 2)], []], allocator="pyramid")
    cache = made(model, protect=[[(1, 2)], [(2, 3)]])
    ids, mask = models.left_pad(models.prompts([20] * 3))
    with pytest.raises(ValueError, match=r"divide.*3"):
        modes.forward(model, cache, ids, mask, 0, 20)


def test_a_static_cache_protects_before_its_first_forward_only() -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([20] * 3))
    cache = made(model, static=True)
    cache.protect([(20, 24)])
    modes.forward(model, cache, ids, mask, 0, 20)
    with pytest.raises(ValueError, match=r"static.*protect"):
        cache.protect([(2, 4)])
