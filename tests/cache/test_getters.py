"""A getter changes nothing. The exceptions are few, and all that they change is a note."""

import copy
import hashlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

#: Methods that ask, of a cache and of a layer. What is no method is a property.
ASKING = ("get_seq_length", "get_max_length", "stats", "block_table", "__repr__", "__len__")
#: These take note of being asked, see `PagedEvictionCache.is_sliding` and `scores.refresh`.
NOTING = ("is_sliding", "get_mask_sizes", "block_scores")


def read(cache: PagedEvictionCache, *counts: int) -> list[Tensor]:
    """The logits of forwards of so many tokens."""
    model, logits = models.build("llama"), []
    with torch.no_grad():
        for count in counts:
            ids = torch.arange(2 * count).view(2, count) * 7 % 60
            logits.append(model(ids, **{CACHE_ARGUMENT: cache}).logits)
    return logits


def digest(cache: PagedEvictionCache) -> str:
    """Of all that the cache is made of, tensors included."""
    return hashlib.sha256(pickle.dumps(cache)).hexdigest()


def answers(thing: Any) -> dict[str, Any]:
    """What a cache or a layer says of itself, by the name of who was asked."""
    names = [name for name in dir(type(thing)) if isinstance(getattr(type(thing), name), property)]
    values = {name: getattr(thing, name) for name in names if name not in NOTING}
    return values | {name: getattr(thing, name)() for name in ASKING if hasattr(thing, name)}


@pytest.fixture(params=["paged_eviction", "keydiff"])
def cache(request: pytest.FixtureRequest) -> PagedEvictionCache:
    config = models.build("llama").config
    filled = PagedEvictionCache(config, budget=24, block_size=4, policy=request.param)
    read(filled, 40, 1, 1)
    return filled


def test_a_getter_changes_nothing(cache: PagedEvictionCache) -> None:
    before = digest(cache)
    for thing in (cache, *cache.layers):
        assert {"get_seq_length", "stats", "keys" if thing is not cache else "policy"} <= answers(thing).keys()
        assert digest(cache) == before, thing


def test_of_masks_only_a_note_is_taken(cache: PagedEvictionCache) -> None:
    """For which columns a mask is made."""
    state = vars(cache._forwards)
    for ask in (lambda: cache.is_sliding, lambda: cache.get_mask_sizes(1), lambda: cache.get_mask_sizes(3)):
        notes, before = {name: copy.copy(state[name]) for name in ("begun_at", "_asked_at")}, digest(cache)
        ask()
        assert any(state[name] != note for name, note in notes.items())
        state.update(notes)
        assert digest(cache) == before


def test_scores_that_are_looked_at_are_those_that_decide(cache: PagedEvictionCache) -> None:
    """They are written down; what goes next is what would have gone."""
    watched = copy.deepcopy(cache)
    steps = [1, 1, 1, 1, 1, 1, 9, 1, 1, 1]
    logits = []
    for count in steps:
        watched.block_scores()
        logits += read(watched, count)
    assert all(torch.equal(one, other) for one, other in zip(logits, read(cache, *steps), strict=True))
