"""A cache that was told its ids notices a text that was tokenised anew."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache

pytestmark = pytest.mark.contract

LIMITS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def answered(rows: int = 1) -> tuple[Any, PagedEvictionCache, torch.Tensor]:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=48, policy="keydiff")
    ids = torch.arange(3, 63).repeat(rows, 1)
    ids[:, 7] += torch.arange(rows)
    mask = torch.ones_like(ids)
    mask[0, : 5 * (rows - 1)] = 0
    return model, cache, model.generate(ids, attention_mask=mask, past_key_values=cache, **LIMITS)


@pytest.mark.parametrize("rows", [1, 2])
def test_other_ids_are_noticed_and_the_same_are_not(rows: int) -> None:
    model, cache, output = answered(rows)
    seen = cache.get_seq_length()
    assert cache.note_ids(output) and seen == output.shape[1] - 1
    longer = torch.cat([output, output[:, :4]], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.note_ids(longer) and copy.deepcopy(cache).note_ids(longer)
    for column in (0, seen - 1):
        wrong = longer.clone()
        wrong[-1, column] += 1
        with pytest.warns(UserWarning, match=rf"the {seen} tokens that the cache has seen.*follow_up"):
            assert not cache.note_ids(wrong)
    # The last token of an answer was not fed: another may stand in its place.
    wrong = longer.clone()
    wrong[:, seen] += 1
    assert cache.note_ids(wrong)
    with pytest.warns(UserWarning):
        assert not cache.note_ids(longer[:, : seen - 1])
    # What was noted reaches as far as what was seen since.
    more = model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, **LIMITS)
    assert cache.note_ids(more)
    with pytest.warns(UserWarning):
        assert not cache.note_ids(torch.cat([more[:, :seen], more[:, seen:] + 1], dim=1))


def test_what_changes_rows_or_tokens_begins_anew() -> None:
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(1),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 1])),
        lambda cache: cache.follow_up(torch.ones(2, 1, dtype=torch.int64)),
    ):
        _, cache, output = answered(2)
        cache.note_ids(output)
        change(cache)
        assert cache.note_ids(output + 1)
    model, cache, output = answered()
    cache.note_ids(output)
    cache.reset()
    model.generate(output + 1, attention_mask=torch.ones_like(output), past_key_values=cache, **LIMITS)
    assert cache.note_ids(torch.cat([output + 1, output[:, :6]], dim=1))


def test_a_crop_behind_what_was_noted_changes_nothing() -> None:
    model = models.shared("llama")
    cache, ids = PagedEvictionCache(model.config, budget=64), torch.arange(3, 33)[None]
    with torch.inference_mode():
        model(ids[:, :20], past_key_values=cache)
        cache.note_ids(ids[:, :20])
        model(ids[:, 20:], past_key_values=cache)
        cache.crop(-4)
    with pytest.warns(UserWarning):
        assert not cache.note_ids(ids + 1)
    cache.crop(-10)
    assert cache.note_ids(ids + 1)
