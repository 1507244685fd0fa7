"""Answers that are taken back: `crop` warns once where it leaves traces, and a copy from before the answer does not."""

import copy
import warnings
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

EXACT: list[dict[str, Any]] = [{"policy": "keydiff"}, {"policy": "paged_eviction", "heads": "separate"}]
TRACES: list[dict[str, Any]] = [
    {"policy": "h2o"},
    {"policy": "snapkv(window=4)"},
    {"policy": "expected_attention"},
    {"policy": "lazy_eviction(lag=5)"},
    {"policy": "keydiff", "bits": 4},
]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack(models.prompts([60, 60], seed=4))
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("settings", [*EXACT, *TRACES], ids=str)
def test_crop_warns_once_where_it_leaves_traces(settings: dict[str, Any]) -> None:
    model = models.shared("llama", "paged_eviction")
    cache, (ids, mask) = PagedEvictionCache(model.config, 48, 4, **settings), text()
    modes.forward(model, cache, ids, mask, 0, 30)
    for turn in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            modes.forward(model, cache, ids, mask, 30, 36)
            cache.crop(-6)
        said = [str(warning.message) for warning in caught if "crop takes" in str(warning.message)]
        expected = settings in TRACES and turn == 0
        assert len(said) == expected, said
        assert all("copy.deepcopy(cache)" in message and "iB" in message for message in said)
    cache.activate_past_recording()
    modes.forward(model, cache, ids, mask, 30, 36)
    fresh = PagedEvictionCache(model.config, 48, 4, **settings)
    modes.forward(model, fresh, ids, mask, 0, 30)
    fresh.activate_past_recording()
    modes.forward(model, fresh, ids, mask, 30, 36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.crop(-6)  # which were pending


@pytest.mark.parametrize("settings", [*EXACT, *TRACES], ids=str)
def test_a_copy_from_before_the_answer_answers_as_the_first_time(settings: dict[str, Any]) -> None:
    model = models.shared("llama", "paged_eviction")
    cache, (ids, mask) = PagedEvictionCache(model.config, 24, 4, **settings), text()
    modes.forward(model, cache, ids, mask, 0, 34)
    for at in range(34, 40):  # in the middle of a block
        modes.forward(model, cache, ids, mask, at, at + 1)
    before = copy.deepcopy(cache)
    answers = [
        torch.cat([modes.forward(model, one, ids, mask, at, at + 1) for at in range(40, 60)], dim=1)
        for one in (cache, before)
    ]
    assert torch.equal(*answers)
