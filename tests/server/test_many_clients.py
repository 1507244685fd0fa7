"""Many requests over HTTP at once: some are broken off, some cannot be served, the others give what they give alone."""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import talking

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)


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
