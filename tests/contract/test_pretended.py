"""The cache on an accelerator that is pretended: mixing devices raises, and numbers are those of the CPU.

A device stays for the rest of its process, where everybody finds it. So each test runs in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from processes import in_processes

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="devices in Python are new in torch"),
    pytest.mark.skipif(not models.HAS_HYBRID_CACHE, reason="static=True needs transformers 5.14"),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "paged_eviction"},
        {"policy": "h2o", "heads": "separate"},
        {"policy": "snapkv", "allocator": "cake"},
        {"policy": "keydiff", "static": True},
        {"policy": "keydiff", "bits": 4},
        {"policy": "recency", "positions": "cache"},
        {"policy": "keydiff", "disposal": "recall(blocks=2)"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_it_says_what_the_cpu_says(settings: dict[str, object]) -> None:
    (evicted,) = in_processes(1, compare, settings)
    assert evicted > 0


def compare(_: int, settings: dict[str, object]) -> int:
    """How many tokens left."""
    import pretend

    torch.set_num_threads(1)
    ids, mask = models.left_pad(models.prompts([60, 45, 33], seed=1))
    said = []
    for device in ("cpu", pretend.NAME):
        with pretend.Constructors():
            model = models.build("llama", "paged_eviction").to(device)
            cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
            tokens = modes.generate(model, cache, ids.to(device), mask.to(device), 6)
            said.append(tokens.cpu())
            assert cache.layers[0].keys.device.type == device
    assert torch.equal(*said)
    return cache.stats().evicted_tokens
