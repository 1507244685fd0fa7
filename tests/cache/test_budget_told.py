"""What `budget` tells is the mean over layers, however it was given."""

from __future__ import annotations

import pytest

import models
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize(("budget", "mean"), [(32, 32), ([16, 48], 32), ([16, 44], 30), ([20, 24], 22)])
def test_the_mean(budget: int | list[int], mean: int) -> None:
    model = models.shared("llama", "paged_eviction")
    assert PagedEvictionCache(model.config, budget=budget, block_size=4).budget == mean


def test_of_a_list_that_became_smaller() -> None:
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=[20, 40], block_size=4)
    cache.shrink([16, 20])
    assert cache.budget == 18
