"""Many requests at once, with cancels and requests that cannot be served among them, on the embedded model."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import driving
import pytest
import talking
import torch
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
        name, new = f"{index:03}", self._draw.randint(4, 24)
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
    check(18, 6)


@pytest.mark.load
def test_load() -> None:
    check(200, 16)


class Clients:
    """Requests over HTTP: some are read to their end, some broken off in the middle, some cannot be served.

    Attributes:
        wrong: what was not answered as it should be.
    """

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._served: Any = None
        answered = [at for at in range(requests) if at % 5 not in (1, 3)]
        self._wanted = {at: talking.expected(talking.prompt(at % 7), _new(at)) for at in answered}
        self.wrong: list[Any] = []

    def run(self, served: Any, at_once: int) -> None:
        self._served = served
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(self._one, range(self._requests)))

    def _one(self, number: int) -> None:
        prompt = talking.prompt(number % 7)
        body = {"model": "embedded", "prompt": prompt, "max_tokens": _new(number), "stream": number % 2 == 0}
        kind = number % 5
        if kind == 1:
            self._break_off(body | {"max_tokens": talking.MOST, "stream": number % 2 == 0})
        elif kind == 3:
            got = self._served.http.post("/v1/completions", json=body | {"max_tokens": -number})
            self._check(number, got.status_code, 400)
        elif body["stream"]:
            parts = self._served.client.completions.create(**body)
            self._check(number, "".join(part.choices[0].text for part in parts), self._wanted[number])
        else:
            answer = self._served.client.completions.create(**body)
            self._check(number, answer.choices[0].text, self._wanted[number])

    def _check(self, number: int, got: Any, wanted: Any) -> None:
        if got != wanted:
            self.wrong.append((number, got, wanted))

    def _break_off(self, body: dict[str, Any]) -> None:
        """Kill the connection, without a word."""
        with socket.create_connection((self._served.host, self._served.port)) as connection:
            sent = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            time.sleep(0.05)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _new(number: int) -> int:
    return 4 + number % 9


def check_clients(requests: int, at_once: int) -> None:
    pytest.importorskip("typer", reason="the extra `eval` is not installed")
    clients = Clients(requests)
    with talking.serving() as served:
        clients.run(served, at_once)
        after = talking.wait_until_free(served)
    assert not clients.wrong
    assert after['answers_total{end="length"}'] == len([at for at in range(requests) if at % 5 not in (1, 3)])
    broken = len([at for at in range(requests) if at % 5 == 1])
    assert after.get('answers_total{end="cancelled"}', 0) <= broken
    assert after['refused_requests_total{status="400"}'] == len([at for at in range(requests) if at % 5 == 3])
    assert 'answers_total{end="failed"}' not in after


def test_few_clients() -> None:
    check_clients(15, 5)


@pytest.mark.load
def test_clients() -> None:
    check_clients(200, 16)
