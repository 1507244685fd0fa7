"""Spans of tokens that are never evicted, wherever they stand: named at construction, or between turns."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_one_threshold import Coarse
from torch import Tensor

import models
import modes
from evicting import FOLLOWED
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from reference import Recorder, assert_evicted, assert_exact

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
#: In the middle of the prompt, at its end and beyond, and among what is generated.
SPANS = [(9, 14), (38, 42), (45, 47)]


def made(model: Any, budget: Any = 56, block_size: int = 4, **settings: Any) -> PagedEvictionCache:
    return models.paged(model.config, budget=budget, block_size=block_size, **settings)


def holds(cache: Any, row: int, spans: list[tuple[int, int]], seen: int) -> bool:
    named = {at for span in spans for at in range(*span) if at < seen}
    return all(named <= set(head) for _, layer in cache.paged_layers for head in layer.positions[row].tolist())


def everywhere(cache: Any, row: int) -> set[int]:
    """What all layers and heads hold of a row."""
    held = [set(head) for _, layer in cache.paged_layers for head in layer.positions[row].tolist()]
    return set.intersection(*held) - {-1}


def some_go(cache: Any) -> bool:
    return bool(cache.stats().evicted_tokens)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("mode", FOLLOWED)
def test_exact_in_every_mode(mode: str, heads: str, padded: bool) -> None:
    """The recorder looks after each forward whether every named token is held; dead slots hold NaN."""
    model = models.shared("llama")
    spans = [(9, 13), (21, 22)]
    cache = made(model, 28, heads=heads, protect=spans, record_past=mode in modes.SPECULATIVE)
    ids, mask = modes.batch(mode, padded)
    with Recorder(model, cache, poison=True) as recorder:
        modes.run(model, cache, mode, ids, mask)
    assert_exact(model, recorder)
    assert_evicted(recorder)


EVERYWHERE: list[dict[str, Any]] = [
    {},
    {"policy": "recency", "heads": "separate"},
    {"policy": Coarse(), "heads": "separate", "allocator": "global"},
    {"policy": "key_norm", "heads": "separate", "allocator": "ada_kv"},
    {"policy": "snapkv(window=4)", "allocator": "pyramid"},
    {"policy": "h2o", "allocator": "cake"},
    {"policy": "lazy_eviction(lag=8)", "block_size": 2},
    {"policy": "keydiff", "positions": "cache"},
    {"policy": "key_norm", "bits": 8},
    {"policy": "key_norm", "disposal": "recall(blocks=2)", "budget": 64},
    {"policy": "key_norm", "budget": "60kB"},
    {"policy": "key_norm", "budget": "90%"},
    *([{"policy": "key_norm", "static": True}] if models.VERSION >= (5, 14) else []),
]


@pytest.mark.parametrize("settings", EVERYWHERE, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("chunk", [None, 11], ids=["one forward", "chunks"])
def test_never_leave(settings: dict[str, Any], padded: bool, chunk: int | None) -> None:
    """While the prompt overflows, and while more single tokens come than the budget has slots."""
    if chunk and str(settings.get("budget")).endswith("%"):
        pytest.skip("a share of the first chunk is too small for any span")
    model = models.shared("llama", OURS)
    cache = made(model, **{"protect": SPANS, **settings})
    ids, mask = models.left_pad(models.prompts([70, 58] if padded else [70, 70], seed=1))
    more = torch.stack(models.prompts([70] * len(ids), seed=3))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, more.shape[1])
    for start, stop in pairwise([*range(0, 70, chunk or 70), *range(70, 141)]):
        modes.forward(model, cache, ids, mask, start, stop)
        for row in range(len(ids)):
            assert holds(cache, row, SPANS, int(mask[row, :stop].sum()))
    assert some_go(cache) or cache.paged_layers[0][1].action.picks_blocks


def run(model: Any, cache: Any, ids: Tensor, mask: Tensor, steps: int) -> None:
    """The prompt, then tokens that do not depend on what is held."""
    more = torch.stack(models.prompts([steps], seed=3)).expand(len(ids), -1)
    start, ids, mask = ids.shape[1], torch.cat([ids, more], dim=1), modes.extend(mask, steps)
    modes.forward(model, cache, ids, mask, 0, start)
    for at in range(start, ids.shape[1]):
        modes.forward(model, cache, ids, mask, at, at + 1)


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
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
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


TURNS: list[dict[str, Any]] = [
    {"policy": "key_norm"},
    {"policy": Coarse(), "heads": "separate", "allocator": "global"},
    {"policy": "key_norm", "heads": "separate", "allocator": "ada_kv"},
    {"policy": "h2o", "allocator": "cake"},
    {"policy": "key_norm", "positions": "cache"},
    {"policy": "key_norm", "bits": 8},
    {"policy": "key_norm", "disposal": "recall(blocks=2)", "budget": 64},
]


@pytest.mark.parametrize("settings", TURNS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_between_turns(settings: dict[str, Any], padded: bool) -> None:
    """A span that is named in the middle of a block, some of it in the block that is being overwritten, stays from then
    on; one that is named no more may go; the budget holds."""
    model = models.shared("llama", OURS)
    cache = made(model, **{"budget": 48, "sink_tokens": 2, **settings})
    ids, mask = models.left_pad(models.prompts([60, 44] if padded else [60, 60], seed=1))
    more = torch.stack(models.prompts([130] * len(ids), seed=3))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, 130)
    modes.forward(model, cache, ids, mask, 0, 60)
    for at in range(60, 62):
        modes.forward(model, cache, ids, mask, at, at + 1)
    by_row = settings.get("allocator") != "cake"
    held = [everywhere(cache, row) for row in range(2)]
    named = [sorted(own if by_row else set.intersection(*held))[3:6] for own in held]
    assert all(named)
    total = sum(int(layer.positions.ge(0).sum()) for _, layer in cache.paged_layers)
    spans = [[(at, at + 1) for at in own] for own in named]
    cache.protect(spans if by_row else spans[0])
    assert sum(int(layer.positions.ge(0).sum()) for _, layer in cache.paged_layers) <= total
    for start, stop in pairwise([62, 70, *range(71, 120)]):
        modes.forward(model, cache, ids, mask, start, stop)
        assert holds(cache, 0, spans[0], 200) and holds(cache, 1, spans[1], 200)
    cache.protect(None)
    for start, stop in pairwise([119, 150, *range(151, 185)]):
        modes.forward(model, cache, ids, mask, start, stop)
    if by_row and "disposal" not in settings:
        assert not (holds(cache, 0, spans[0], 200) and holds(cache, 1, spans[1], 200))


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
    with pytest.raises(ValueError, match="recall"):
        PagedEvictionCache(config, 24, 4, policy="key_norm", disposal="recall(blocks=2)", protect=[(9, 10)])
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


@pytest.mark.parametrize(
    ("protect", "error", "says"),
    [
        ("system", TypeError, "spans_of_roles"),
        ([(3, 2)], ValueError, "after its last"),
        ([(-1, 2)], ValueError, "counted from 0"),
        ([(1, 2, 3)], TypeError, "pairs"),
        ([3], TypeError, "pairs"),
        ([[(1, 2)], "x"], TypeError, "pairs"),
        ([(True, 2)], TypeError, "pairs"),
    ],
    ids=str,
)
def test_what_is_no_span(protect: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        PagedEvictionCache(models.shared("llama").config, 64, 4, protect=protect)


def test_what_does_not_go_together_is_refused() -> None:
    model = models.shared("llama", OURS)
    with pytest.raises(ValueError, match=r"protect=.*2.*'pyramid'"):
        made(model, protect=[[(1, 2)], []], allocator="pyramid")
    cache = made(model, protect=[[(1, 2)], [(2, 3)]])
    ids, mask = models.left_pad(models.prompts([20] * 3))
    with pytest.raises(ValueError, match=r"divide.*3"):
        modes.forward(model, cache, ids, mask, 0, 20)


@pytest.mark.skipif(models.VERSION < (5, 14), reason="a static cache needs transformers 5.14")
def test_a_static_cache_protects_before_its_first_forward_only() -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([20] * 3))
    cache = made(model, static=True)
    cache.protect([(20, 24)])
    modes.forward(model, cache, ids, mask, 0, 20)
    with pytest.raises(ValueError, match=r"static.*protect"):
        cache.protect([(2, 4)])
