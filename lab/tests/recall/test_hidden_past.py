"""A mask that hides tokens of the past is refused, and nothing has changed then."""

import pytest
import torch

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("disposal", ["recall(blocks=1)", "recall(blocks=all)"])
def test_recall(disposal: str) -> None:
    model = models.shared("llama", "paged_eviction")
    ids = torch.stack(models.prompts([60, 60], seed=6))
    mask = torch.ones_like(ids)
    caches = [PagedEvictionCache(model.config, budget=32, block_size=4, disposal=disposal), modes.dynamic(model)]
    for cache in caches:
        modes.forward(model, cache, ids, mask, 0, 20)
    for hidden in (slice(6, 9), slice(17, 20)):  # in the middle, and the end of a row
        other = mask.clone()
        other[0, hidden] = 0
        with pytest.raises(ValueError, match="disposal='drop'"):
            modes.forward(model, caches[0], ids, other, 20, 24)
    assert_close(*(modes.forward(model, cache, ids, mask, 20, 24) for cache in caches))
    modes.forward(model, caches[0], ids, mask, 24, 50)
    held = caches[0].paged_layers[0][1].positions.tolist()
    mask[1, 48:50] = 0
    with pytest.raises(ValueError, match="copied"):
        modes.forward(model, caches[0], ids, mask, 50, 54)
    assert caches[0].paged_layers[0][1].positions.tolist() == held
