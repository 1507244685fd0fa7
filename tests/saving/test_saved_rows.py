"""A context whose rows were chosen among others is saved and loaded like any other."""

from pathlib import Path

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_one_of_many_rows(heads: str, tmp_path: Path) -> None:
    """Rows are full at different columns, and the cache remembers those of the rows that were dropped, too."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40, 33, 9, 21, 30, 17, 25, 5]))
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, heads=heads)
    modes.forward(model, cache, ids, mask, 0, 10)
    for at in range(10, 32):
        modes.forward(model, cache, ids, mask, at, at + 1)
    cache.batch_select_indices(torch.tensor([3]))
    cache.save(tmp_path / "row.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "row.safetensors", model.config)
    tables = [one.layers[0].state.known.counters for one in (cache, loaded)]
    assert tables[0] == tables[1]
    for at in range(32, 40):
        logits = [modes.forward(model, one, ids[3:4], mask[3:4], at, at + 1) for one in (cache, loaded)]
        assert torch.equal(*logits)
