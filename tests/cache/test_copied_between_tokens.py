"""A copy in the middle of a block goes on as the cache does, whatever was prepared for its next tokens."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models
import modes

#: Heads of 48 and 16 tokens, and the other way round.
UNEQUAL = "heads:[[1.5, 0.5], [0.6, 1.4]]"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("settings", [{"bits": 4}, {"bits": 4, "allocator": UNEQUAL}, {"allocator": UNEQUAL}], ids=str)
def test_it_says_the_same(settings: dict[str, Any], tokens: int, copied: Callable[[Any], Any]) -> None:
    model, ids = models.shared("llama", "paged_eviction"), torch.stack(models.prompts([60, 60]))
    mask = torch.ones_like(ids)
    cache = models.paged(model.config, budget=32, block_size=8, policy="keydiff", **settings)
    for start, stop in ((0, 20), (20, 40), *((at, at + 1) for at in range(40, 40 + tokens))):
        modes.forward(model, cache, ids, mask, start, stop)
    twin = copied(cache)
    for at in range(40 + tokens, 60):
        said = [modes.forward(model, each, ids, mask, at, at + 1) for each in (cache, twin)]
        assert torch.equal(*said)
