"""A cache that was pickled goes on as the one it was made of."""

import io
import pickle
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache


@pytest.mark.parametrize("write", [pickle.dumps, torch.save], ids=["pickle", "torch"])
def test_what_comes_back_goes_on(write: Any) -> None:
    """With tensors of its own."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([46, 30, 39]))
    cache = PagedEvictionCache(model.config, budget=16, block_size=4, policy="recency")
    modes.forward(model, cache, ids, mask, 0, 30)
    file = io.BytesIO()
    if write is torch.save:
        torch.save(cache, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(cache))
    assert not {layer.keys.data_ptr() for layer in twin.layers} & {layer.keys.data_ptr() for layer in cache.layers}
    for at in range(30, 40):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits), at
    twin.release()
    assert modes.forward(model, twin, ids, mask, 0, 30).isfinite().all()
