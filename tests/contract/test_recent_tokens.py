"""`recent_tokens=`: the newest tokens of each row stay, in whatever way a cache is driven.

`check` compares every run with the slow reference, whose `check_layer` asks for these tokens after each forward.
"""

import pytest
import torch

import models
import modes
from evicting import binding

pytestmark = pytest.mark.contract

OURS = "paged_eviction"


@pytest.mark.parametrize("policy", ["keydiff", "h2o(recent=0)"])
def test_one_block_is_the_default(policy: str) -> None:
    """The same tokens held, whether it is said or not."""
    model, held = models.shared("llama", OURS), []
    for settings in ({}, {"recent_tokens": 4}, {"recent_tokens": 9}):
        cache = binding(model, "two_turns", policy=policy, **settings)
        modes.run(model, cache, "two_turns", *modes.batch("two_turns", padded=True))
        held.append(torch.stack([layer.positions for _, layer in cache.paged_layers]))
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])


@pytest.mark.parametrize("mode", ["direct", "two_turns"])
def test_h2o_as_published(mode: str) -> None:
    """The recent half of H2O is this choice: both hold the same tokens."""
    model, held = models.shared("llama", OURS), []
    for settings in ({"policy": "h2o"}, {"policy": "h2o(recent=0)", "recent_tokens": 12}):
        cache = binding(model, mode, **settings)
        modes.run(model, cache, mode, *modes.batch(mode, padded=True))
        held.append(torch.stack([layer.positions for _, layer in cache.paged_layers]))
    assert torch.equal(*held)
