"""Runs in which something has to go, compared with the slow reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import models
import modes
from closeness import SHARE
from hf_paged_eviction import PagedEvictionCache
from reference import Recorder, assert_evicted, assert_exact

#: Modes whose rows can be followed column by column (sampling and embeddings feed the cache like greedy).
FOLLOWED = (
    "greedy",
    "beam",
    "chunked_prefill",
    "two_turns",
    "three_turns",
    "direct",
    "inputs_embeds",
    "prompt_lookup",
    "assisted",
)
#: One of each kind; the others are made of the same calls.
DISTINCT = ("beam", "three_turns", "direct", "assisted")
#: `FOLLOWED` for rooms other than that of the promises themselves: all of them under `--all-cases`.
KINDS = [pytest.param(mode, marks=() if mode in DISTINCT else pytest.mark.all_cases) for mode in FOLLOWED]


def binding(model: object, mode: str, **settings: object) -> PagedEvictionCache:
    defaults = {"budget": 24, "block_size": 4}
    if "deepseek" in type(model).__name__.lower():
        defaults["policy"] = "keydiff"
    return models.paged(model.config, **{**defaults, **settings})


@contextmanager
def exact(
    model: Any, cache: PagedEvictionCache, *, poison: bool = False, share: float = SHARE, replayed: bool = False
) -> Iterator[None]:
    """What runs inside has to evict something, and every logit of it is the slow reference's."""
    with Recorder(model, cache, poison=poison) as recorder:
        yield
    assert_evicted(recorder)
    assert_exact(model, recorder, share, replayed=replayed)


def check(family: str, attention: str, mode: str, padded: bool, **settings: object) -> None:
    model = models.shared(family, attention)
    cache = binding(model, mode, **settings)
    ids, mask = modes.batch(mode, padded)
    with exact(model, cache, poison=True):
        modes.run(model, cache, mode, ids, mask)
