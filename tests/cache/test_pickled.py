"""A cache that was pickled goes on as the one it was made of."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache, StoragePool


@pytest.mark.parametrize("write", [pickle.dumps, torch.save], ids=["pickle", "torch"])
def test_with_a_pool(write: Any) -> None:
    """What comes back has tensors of its own, and a pool that knows nothing of them."""
    model, pool = models.shared("llama"), StoragePool()
    ids, mask = models.left_pad(models.prompts([46, 30, 39]))
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="recency", pool=pool)
    modes.forward(model, cache, ids, mask, 0, 30)
    file = io.BytesIO()
    if write is torch.save:
        torch.save(cache, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(cache))
    assert twin.pool is not pool and twin.pool.taken_bytes == twin.pool.free_bytes == 0
    assert all(layer.store.room.pool is twin.pool for layer in twin.layers)
    for at in range(30, 40):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits), at
    taken = pool.taken_bytes
    twin.release()
    assert pool.taken_bytes == taken > 0 and twin.pool.free_bytes == 0
    assert modes.forward(model, twin, ids, mask, 0, 30).isfinite().all()
