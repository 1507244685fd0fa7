"""Many requests at once, with cancels and requests that cannot be served among them, on the embedded model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

import driving
from driving import alone, greedy, pool, texts
from hf_paged_eviction.serving import paged_batching

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

CHUNK, PAGES_EACH = 32, 4
OPTIONS: dict[str, Any] = {"budget": 64, "block_size": 8, "policy": "calibrated:embedded"}


@cache
def embedded() -> Any:
    """The trained model: random ones have no memory to lose. In float64, so that no last bit decides."""
    from hf_paged_eviction_eval.embedded import load

    return load(torch.float64)[0]


class Load:
    """So many requests, `at_once` of them at a time.

    Attributes:
        wanted: prompts and lengths of the requests that are to be answered.
        answers: their tokens.
        errors: what the others were told.
    """

    def __init__(self, requests: int, at_once: int) -> None:
        self._draw = random.Random(0)
        self._at_once = at_once
        lengths = [self._draw.randint(1, 150) for _ in range(requests)]
        self._prompts = texts(lengths)
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.cancelled: set[str] = set()

    def run(self, manager: Any) -> None:
        rest = list(enumerate(self._prompts))
        live: set[str] = set()
        while rest or live:
            while rest and len(live) < self._at_once:
                live |= self._send(manager, *rest.pop(0))
            result = manager.get_result(timeout=0.5)
            if result is None:
                assert manager.is_running()
                continue
            if result.is_finished():
                live.discard(result.request_id)
                self._note(result)
            elif result.request_id in self.cancelled & live and len(result.generated_tokens) > 2:
                manager.cancel_request(result.request_id)  # a client that went away in the middle
                live.discard(result.request_id)

    def _send(self, manager: Any, index: int, prompt: list[int]) -> set[str]:
        name, new = f"{index:03}", self._draw.randint(4, 16)
        if index % 10 == 7:  # hostile
            manager.add_request([10**7], request_id=name, max_new_tokens=new)
        elif index % 10 == 3:
            manager.add_request(prompt, request_id=name, max_new_tokens=10_000, streaming=True, eos_token_id=-1)
            self.cancelled.add(name)
        else:
            self.wanted[name] = prompt, new
            manager.add_request(prompt, request_id=name, max_new_tokens=new, eos_token_id=-1)
        return {name}

    def _note(self, result: Any) -> None:
        if result.error is None:
            self.answers[result.request_id] = result.generated_tokens
        else:
            self.errors[result.request_id] = result.error


def check(requests: int, at_once: int) -> None:
    model, load = embedded(), Load(requests, at_once)
    config = pool(at_once * PAGES_EACH, 16, CHUNK + at_once)
    with paged_batching(model, prefill_chunk_size=CHUNK, **OPTIONS) as running:
        manager = model.init_continuous_batching(greedy(20), config)
        manager.start()
        load.run(manager)
        manager.stop(keep_for_next_session=True)
        stats = running.stats()
    assert stats.pages_in_use == stats.live == stats.waiting == 0
    assert stats.admitted + stats.refused == requests
    assert len(load.errors) == stats.refused == len([at for at in range(requests) if at % 10 == 7])
    assert len(load.cancelled) > requests // 20
    expected = {
        name: alone(model, prompt, new, prefill_chunk_size=CHUNK, **OPTIONS)
        for name, (prompt, new) in load.wanted.items()
    }
    assert load.answers == expected


def test_small_load() -> None:
    check(14, 5)


@pytest.mark.load
def test_load() -> None:
    check(200, 16)
