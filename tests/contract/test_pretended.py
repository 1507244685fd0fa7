"""The cache on an accelerator that is pretended: mixing devices raises, and numbers are those of the CPU.

A device stays for the rest of its process, where everybody finds it. So all of it runs in a process of its own.
"""

import traceback
from itertools import pairwise
from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from processes import in_processes

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="devices in Python are new in torch"),
]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"policy": "paged_eviction"},
    "observing": {"policy": "h2o", "heads": "separate"},
    "sharing out": {"policy": "h2o", "allocator": "cake"},
    "static": {"policy": "keydiff", "static": True},
    "in 4 bits": {"policy": "keydiff", "bits": 4},
    "in the cache": {"policy": "recency", "positions": "cache"},
}
#: How text is generated: rows of beams move.
HOW: dict[str, dict[str, Any]] = {"sharing out": {"num_beams": 2}}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Of one process, in which the device stays: how many tokens left, or what went wrong."""
    (report,) = in_processes(1, all_answers)
    return report


@pytest.mark.parametrize("name", SETTINGS)
def test_it_says_what_the_cpu_says(name: str, answers: dict[str, Any]) -> None:
    assert isinstance(answers[name], int) and answers[name] > 0, answers[name]


def all_answers(_: int) -> dict[str, Any]:
    """By name of the settings."""
    reports: dict[str, Any] = {}
    torch.set_num_threads(1)
    for name, settings in SETTINGS.items():
        try:
            reports[name] = compare(settings, HOW.get(name, {}))
        except Exception:
            reports[name] = traceback.format_exc()
    return reports


def compare(settings: dict[str, Any], how: dict[str, Any]) -> int:
    """How many tokens left."""
    import pretend

    ids, mask = models.left_pad(models.prompts([60, 45, 33], seed=1))
    answers = []
    for device in ("cpu", pretend.NAME):
        with pretend.Constructors():
            model = models.build("llama", "paged_eviction").to(device)
            cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
            tokens = modes.generate(model, cache, ids.to(device), mask.to(device), 6, **how)
            answers.append([tokens.cpu()])
            assert cache.layers[0].keys.device.type == device
            if not settings.get("static"):
                cache.reset()
                for start, stop in pairwise([0, *range(20, 31)]):  # with its pads
                    modes.forward(model, cache, ids.to(device), mask.to(device), start, stop)
                answers[-1].append(cache.layers[0].positions.cpu())
    assert all(map(torch.equal, *answers))
    return cache.stats().evicted_tokens
