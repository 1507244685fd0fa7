"""What `budget` tells is the mean over layers, however it was given."""

from typing import Any

import pytest

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

MODEL = models.shared("llama", "paged_eviction")


def test_the_mean() -> None:
    for budget, mean in ((32, 32), ([16, 48], 32), ([16, 44], 30), ([20, 24], 22)):
        assert PagedEvictionCache(MODEL.config, budget, block_size=4).budget == mean
    cache = PagedEvictionCache(MODEL.config, [20, 40], block_size=4)
    cache.shrink([16, 20])
    assert cache.budget == 18


@pytest.mark.parametrize(
    ("budgets", "message"),
    [([32, 16], None), ([48, 16], r"\[48, 16\]"), ([32], "1 budgets were given for the 2"), (20, "pass a list")],
)
def test_budgets_of_layers_shrink_one_by_one(budgets: Any, message: str | None) -> None:
    cache = PagedEvictionCache(MODEL.config, [40, 24], block_size=4)
    MODEL(models.prompts([60])[0][None], **{CACHE_ARGUMENT: cache})
    if message is None:
        cache.shrink(budgets)
        assert [layer.held for _, layer in cache.paged_layers] == budgets
        assert cache._options.settings()["budget"] == budgets
    else:
        with pytest.raises(ValueError, match=message):
            cache.shrink(budgets)
        assert [layer.held for _, layer in cache.paged_layers] == [40, 24]
    plain = PagedEvictionCache(MODEL.config, 40, block_size=4)
    with pytest.raises(ValueError, match=r"one budget.*list"):
        plain.shrink([16, 16])
