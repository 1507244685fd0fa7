"""`recent_tokens=`: the newest tokens of each row stay, in whatever way a cache is driven.

`check` compares every run with the slow reference, whose `check_layer` asks for these tokens after each forward.
"""

from __future__ import annotations

import pytest
import torch

import models
import modes
import rows
from evicting import KINDS, binding, check
from hf_paged_eviction import PagedEvictionCache, make_policy
from reference import Recorder, assert_evicted, assert_exact

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
#: Of blocks of 4 tokens and a budget of 24: none, less than a block, two and a bit, as many as there may be.
RECENT = (0, 3, 9, 16)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", ["keydiff", "random", "h2o(recent=0)", "lazy_eviction(lag=8)"])
@pytest.mark.parametrize("recent", RECENT)
def test_every_way(recent: int, policy: str, heads: str, mode: str, padded: bool) -> None:
    attention = OURS if make_policy(policy).needs.queries else "sdpa"
    check("llama", attention, mode, padded, policy=policy, heads=heads, recent_tokens=recent)


@pytest.mark.parametrize("recent", [0, 9])
@pytest.mark.parametrize("policy", ["keydiff", "h2o(recent=0)"])
def test_rows_do_not_depend_on_their_batch(policy: str, recent: int) -> None:
    model = models.shared("llama", OURS)
    settings = {"budget": 24, "block_size": 4, "policy": policy, "recent_tokens": recent}
    assert rows.compare(model, [40, 33, 9, 2], [10, 2, 6, 3], **settings) > 0


@pytest.mark.parametrize("recent", [0, 4, 9])
def test_shrink(recent: int) -> None:
    model = models.shared("llama")
    cache = binding(model, "greedy", budget=32, policy="keydiff", recent_tokens=recent)
    ids, mask = modes.batch("greedy", padded=True)
    with Recorder(model, cache) as recorder:
        ids = modes.generate(model, cache, ids, mask, 6)
        cache.shrink(20)
        assert all(layer.held == 20 for _, layer in cache.paged_layers)
        newest = cache.layers[0].positions.amax(-1, keepdim=True)
        assert (cache.layers[0].positions > newest - recent).sum(-1).eq(recent).all()
        modes.generate(model, cache, ids, modes.extend(mask, 6), 12)
    assert_evicted(recorder)
    assert_exact(model, recorder)
    smallest = 4 * (1 + max(1, -(-recent // 4)) + 1)
    if smallest > 4 * 3:
        with pytest.raises(ValueError, match=rf"recent_tokens={recent}.*{smallest}"):
            cache.shrink(smallest - 4)


@pytest.mark.parametrize("policy", ["keydiff", "h2o(recent=0)"])
def test_one_block_is_the_default(policy: str) -> None:
    """The same tokens held, whether it is said or not."""
    model, held = models.shared("llama", OURS), []
    for settings in ({}, {"recent_tokens": 4}, {"recent_tokens": 9}):
        cache = binding(model, "two_turns", policy=policy, **settings)
        modes.run(model, cache, "two_turns", *modes.batch("two_turns", padded=True))
        held.append(torch.stack([layer.positions for _, layer in cache.paged_layers]))
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])


@pytest.mark.parametrize("mode", ["direct", "two_turns"])
def test_h2o_as_published(mode: str) -> None:
    """The recent half of H2O is this choice: both hold the same tokens."""
    model, held = models.shared("llama", OURS), []
    for settings in ({"policy": "h2o"}, {"policy": "h2o(recent=0)", "recent_tokens": 12}):
        cache = binding(model, mode, **settings)
        modes.run(model, cache, mode, *modes.batch(mode, padded=True))
        held.append(torch.stack([layer.positions for _, layer in cache.paged_layers]))
    assert torch.equal(*held)


@pytest.mark.skipif(models.VERSION < (5, 14), reason="static caches need transformers 5.14")
@pytest.mark.parametrize("recent", [0, 9])
@pytest.mark.parametrize("policy", ["keydiff", "h2o(recent=0)", "lazy_eviction(lag=8)"])
def test_static(policy: str, recent: int) -> None:
    """The same tokens said and held as without `static`; the graph itself knows nothing of victims."""
    model, found = models.shared("llama", OURS), []
    ids, mask = modes.batch("greedy", padded=True)
    for static in (False, True):
        settings = {"budget": 24, "block_size": 4, "policy": policy, "recent_tokens": recent, "static": static}
        cache = PagedEvictionCache(model.config, **settings)
        said = modes.generate(model, cache, ids, mask, 30)
        found.append([said, *(layer.positions for _, layer in cache.paged_layers)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
