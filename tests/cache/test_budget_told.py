"""What `budget` tells is the mean over layers, however it was given."""

import pytest

import models
from hf_paged_eviction import PagedEvictionCache

MODEL = models.shared("llama", "paged_eviction")


def test_a_list_is_no_budget() -> None:
    cache = PagedEvictionCache(MODEL.config, 32, block_size=4)
    for call in (lambda: PagedEvictionCache(MODEL.config, [16, 48], block_size=4), lambda: cache.shrink([16, 20])):
        with pytest.raises(TypeError, match="budget"):
            call()
