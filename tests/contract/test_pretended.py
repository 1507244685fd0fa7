"""The cache on an accelerator that is pretended: mixing devices raises, and numbers are those of the CPU.

A device stays for the rest of its process, where everybody finds it. So these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="devices in Python are new in torch"),
    pytest.mark.skipif(not models.HAS_HYBRID_CACHE, reason="static=True needs transformers 5.14"),
]
_INSIDE = "PAGED_EVICTION_TESTS_PRETEND"


@pytest.mark.skipif(_INSIDE in os.environ, reason="this is the process of their own")
def test_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, _INSIDE: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


@pytest.mark.skipif(_INSIDE not in os.environ, reason="runs in a process of its own")
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
    import pretend

    ids, mask = models.left_pad(models.prompts([60, 45, 33], seed=1))
    said = []
    for device in ("cpu", pretend.NAME):
        with pretend.Constructors():
            model = models.build("llama", "paged_eviction").to(device)
            cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
            tokens = modes.generate(model, cache, ids.to(device), mask.to(device), 6)
            said.append(tokens.cpu())
            assert cache.layers[0].keys.device.type == device
    assert torch.equal(*said) and cache.stats().evicted_tokens > 0
