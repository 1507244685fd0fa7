"""Runs in which something has to go, compared with the slow reference."""

import pytest

import models
import modes
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
    recording = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
    defaults = {"budget": 24, "block_size": 4, "record_past": recording}
    if "deepseek" in type(model).__name__.lower():
        defaults["policy"] = "keydiff"
    return models.paged(model.config, **{**defaults, **settings})


def check(family: str, attention: str, mode: str, padded: bool, **settings: object) -> None:
    model = models.shared(family, attention)
    cache = binding(model, mode, **settings)
    ids, mask = modes.batch(mode, padded)
    with Recorder(model, cache, poison=True) as recorder:
        modes.run(model, cache, mode, ids, mask)
    assert_evicted(recorder)
    assert_exact(model, recorder)
