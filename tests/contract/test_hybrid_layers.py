"""Layers that hold a linear state next to keys and values: the state stays what it is, the rest is paged."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from evicting import exact
from hf_paged_eviction import PagedEvictionCache, verify
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.recipes.probe import feed_probe
from reference import Recorder, assert_exact

pytestmark = [
    pytest.mark.contract,
]


@pytest.fixture(scope="module", params=models.LINEAR_AND_FULL)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def in_calls(family: str, ids: torch.Tensor, mask: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Logits with `DynamicCache`, in calls that end at these columns."""
    held, chunks, start = modes.dynamic(models.shared(family)), [], 0
    for stop in ends:
        chunks.append(modes.forward(models.shared(family), held, ids, mask, start, stop))
        start = stop
    return torch.cat(chunks, dim=1)


@cache
def own_fault(family: str) -> str | None:
    """What goes wrong with `DynamicCache`, too: early releases fail in a second call, or count pads in the state."""
    rows, ends = models.prompts([30, 23, 16]), [11, 20, 27, 30]
    try:
        logits = in_calls(family, *models.left_pad(rows), ends)
        for row, alone in enumerate(rows):
            pads = 30 - len(alone)
            ids = alone[None]
            same = in_calls(family, ids, torch.ones_like(ids), [end - pads for end in ends if end > pads])
            if (same[0] - logits[row, pads:]).abs().max() > 1e-3:
                return f"in several calls pads change what transformers {models.VERSION} says of {family}"
    except RuntimeError as error:
        return f"transformers {models.VERSION} fails in a second call of {family}: {error}"
    return None


@pytest.fixture
def steady(family: str) -> str:
    """A family that `DynamicCache` serves in several calls, with pads and without."""
    if fault := own_fault(family):
        pytest.skip(fault)
    return family


def test_what_is_not_steady_is_compared_call_by_call(family: str) -> None:
    if own_fault(family) is None:
        pytest.skip("steady: see the other tests")
    report = verify(models.shared(family))
    assert report.ok and any(check.error is not None for check in report.checks), str(report)


def cache_of(model: Any, budget: int = 24, **settings: Any) -> PagedEvictionCache:
    return PagedEvictionCache(model.config, budget=budget, block_size=4, **settings)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "direct", "two_turns", "chunked_prefill"])
def test_whole_in_the_budget_is_dynamic_cache(steady: str, mode: str, padded: bool) -> None:
    model = models.shared(steady)
    ids, mask = modes.batch(mode, padded)
    expected = modes.run(model, modes.dynamic(model), mode, ids, mask)
    assert (modes.run(model, cache_of(model, 128), mode, ids, mask) == expected).all()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "direct", "two_turns", "chunked_prefill"])
def test_exact(steady: str, mode: str, padded: bool) -> None:
    model = models.shared(steady)
    cache = cache_of(model, heads="separate" if padded else "shared")
    ids, mask = modes.batch(mode, padded)
    with exact(model, cache, poison=True, replayed=True):
        modes.run(model, cache, mode, ids, mask)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_beams_move_both_halves(family: str, padded: bool) -> None:
    model = models.shared(family)
    cache = cache_of(model)
    ids, mask = modes.batch("beam", padded)
    with exact(model, cache, replayed=True):
        modes.run(model, cache, "beam", ids, mask)


@pytest.mark.parametrize("family", ["zaya"], scope="module")
def test_a_state_left_behind_would_be_noticed(family: str) -> None:
    model = models.shared(family)
    cache = cache_of(model)
    for _, paged in cache.paged_layers:
        paged.reorder_cache = partial(PagedLayer.batch_select_indices, paged)
    ids, mask = modes.batch("beam", padded=True)
    with Recorder(model, cache) as recorder:
        modes.run(model, cache, "beam", ids, mask)
    with pytest.raises(AssertionError, match="logits differ"):
        assert_exact(model, recorder, 1e-2, replayed=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "h2o"},
        {"allocator": "heads:[[5], [9]]", "budget": 28},
        {"allocator": "cake"},
        {"allocator": "ada_kv", "heads": "separate"},
    ],
    ids=str,
)
def test_policies_that_decide_by_attention(steady: str, settings: dict[str, Any]) -> None:
    model = models.shared(steady, "paged_eviction")
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, **settings})
    ids, mask = modes.batch("direct", padded=True)
    with exact(model, cache, replayed=True):
        modes.run(model, cache, "direct", ids, mask, steps=8)


def test_a_row_does_not_depend_on_its_batch(steady: str) -> None:
    model = models.shared(steady)
    rows = models.prompts([30, 19])
    ids, mask = models.left_pad(rows)
    together = modes.run(model, cache_of(model), "greedy", ids, mask)
    for row, alone in enumerate(rows):
        ids = alone[None]
        assert (modes.run(model, cache_of(model), "greedy", ids, torch.ones_like(ids)) == together[row]).all()


def test_bounded_and_counted(family: str) -> None:
    model = models.shared(family)
    cache = cache_of(model)
    ids, mask = modes.batch("greedy", padded=True)
    modes.run(model, cache, "greedy", ids, mask)
    stats = cache.stats()
    paged = [index for index, layer in enumerate(cache.layers) if type(layer).__name__ == "HybridLayer"]
    assert [index for index, _ in cache.paged_layers] == paged == [layer.layer_idx for layer in stats.layers]
    assert (stats.largest_held, stats.budget, stats.seen) == (24, 24, ids.shape[1] + modes.STEPS - 1)
    assert stats.evicted_tokens > 0
    assert stats.storage_bytes == sum(states.nbytes for index in paged for states in kept(cache, index))
    assert all(states.shape[2] == 24 for index in paged for states in kept(cache, index))
    assert cache.get_seq_length() == stats.seen
    assert cache.has_previous_state()
    assert cache.is_linear == modes.dynamic(model).is_linear
    assert cache.block_table(paged[0]).shape[2:] == (6, 4)


def kept(cache: PagedEvictionCache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.layers[index].keys, cache.layers[index].values


def test_reset_release_and_copies(family: str) -> None:
    model = models.shared(family)
    cache = cache_of(model)
    ids, mask = modes.batch("greedy", padded=True)
    first = modes.run(model, cache, "greedy", ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state()
    assert (modes.run(model, cache, "greedy", ids, mask) == first).all()
    cache.release()
    modes.forward(model, cache, ids, mask, 0, ids.shape[1])
    twin = copy.deepcopy(cache)
    step = modes.extend(mask, 1)
    more = torch.cat([ids, ids[:, -1:]], dim=1)
    logits = modes.forward(model, cache, more, step, ids.shape[1], more.shape[1])
    assert torch.equal(modes.forward(model, twin, more, step, ids.shape[1], more.shape[1]), logits)


@pytest.mark.parametrize("family", ["falcon_h1", "zaya"], scope="module")  # all layers are of this kind
def test_rows(family: str) -> None:
    model = models.shared(family)
    ids, mask = modes.batch("greedy", padded=True)

    def after(change: Any) -> torch.Tensor:
        cache = cache_of(model)
        modes.forward(model, cache, ids, mask, 0, ids.shape[1])
        change(cache)
        now = modes.extend(mask[picked], 1)
        return modes.forward(model, cache, torch.cat([ids, tokens], dim=1)[picked], now, ids.shape[1], now.shape[1])

    def by_number(cache: PagedEvictionCache) -> None:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([4, 1]))

    def by_mark(cache: PagedEvictionCache) -> None:
        cache.batch_select_indices(torch.tensor([True, False, True]))
        cache.reorder_cache(torch.tensor([1, 0]))

    tokens, picked = torch.tensor([[5], [6], [7]]), torch.tensor([0, 1, 2])
    whole = after(lambda cache: None)
    picked = torch.tensor([2, 0])
    for change in (by_number, by_mark):
        assert_close(after(change), whole[picked])


def test_a_recurrent_state_cannot_be_taken_back(family: str) -> None:
    if family in ("zamba", "zamba2"):
        pytest.skip("its first layer is linear alone, and transformers refuses")
    model = models.shared(family)
    cache = cache_of(model)
    ids, mask = modes.batch("greedy", padded=False)
    cache.activate_past_recording()
    modes.forward(model, cache, ids, mask, 0, ids.shape[1])
    with pytest.raises(RuntimeError, match="recurrent state"):
        cache.crop(-2)
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("family", ["falcon_h1", "zaya"], scope="module")
def test_a_probe_leaves_no_trace_in_the_linear_state(family: str) -> None:
    model = models.shared(family, "paged_eviction")
    ids, mask = modes.batch("greedy", padded=True)
    cache = PagedEvictionCache(model.config, budget=96, block_size=4, policy="kvzip")
    modes.forward(model, cache, ids, mask, 0, ids.shape[1] - 1)
    twin = copy.deepcopy(cache)
    feed_probe(model, cache, ids[:, :7], modes.extend(mask[:, :-1], 7))
    after = [modes.forward(model, one, ids, mask, ids.shape[1] - 1, ids.shape[1]) for one in (cache, twin)]
    assert torch.equal(*after)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_static(steady: str, padded: bool) -> None:
    if models.VERSION < (5, 19) and steady.startswith("zamba"):
        pytest.skip("generate of this release makes a dict of masks, which this model does not take")
    model = models.shared(steady)
    ids, mask = modes.batch("greedy", padded)
    static = cache_of(model, static=True)
    assert static.is_compileable
    sequences = modes.run(model, static, "greedy", ids, mask)
    assert (sequences == modes.run(model, cache_of(model), "greedy", ids, mask)).all()
