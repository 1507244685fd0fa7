"""A server under attack: odd requests, broken connections and an end in the middle.

One command runs it and shows its numbers: `pytest -m load -s tests/server/test_attack.py`.
"""

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import talking

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

PATHS = {"/v1/completions": {"prompt": talking.prompt(1)}, "/v1/chat/completions": {"messages": []}}
SAID = [
    "",
    "x",
    "\x00",
    "\ud800",
    "\N{GRINNING FACE}" * 50,
    "<tool_call>{",
    "{{ 1 / 0 }}",
    "../../etc/passwd",
    "9" * 5000,
]
NUMBERS = [0, -0.0, -1, 1, 2, 16, 0.5, 1e-320, 1e308, 10**30, -(10**30), 2**63, float("nan"), float("inf")]
ROLES = ["system", "user", "assistant", "tool", "developer", "robot"]


def odd(draw: random.Random, depth: int = 0) -> Any:
    """Any value of JSON, and some that are none."""
    kinds = [lambda: draw.choice(SAID), lambda: draw.choice(NUMBERS), lambda: draw.choice([None, True, False])]
    if depth < 3:
        kinds.append(lambda: [odd(draw, depth + 1) for _ in range(draw.choice([0, 1, 2, 70]))])
        kinds.append(lambda: {draw.choice([*SAID, "type", "text", "1"]): odd(draw, depth + 1) for _ in range(3)})
    return draw.choice(kinds)()


def message(draw: random.Random) -> Any:
    fields = {"role": draw.choice(ROLES), "content": draw.choice([talking.PLACES, *SAID, odd(draw)])}
    if draw.random() < 0.3:
        call = {"name": draw.choice(SAID), "arguments": draw.choice(["{}", "[]", "[" * 3000, *SAID])}
        fields["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
    if draw.random() < 0.2:
        fields[draw.choice(["name", "tool_call_id", "refusal", "audio", "content"])] = odd(draw)
    return fields


def odd_body(draw: random.Random, fields: dict[str, list[str]]) -> tuple[str, bytes]:
    """A path and a body: most are right but for one, two or three fields."""
    path = draw.choice(list(PATHS))
    body: dict[str, Any] = {"model": "embedded", "max_tokens": 2} | PATHS[path]
    if path.endswith("chat/completions"):
        body["messages"] = [message(draw) for _ in range(draw.choice([1, 1, 2, 5]))]
    elif draw.random() < 0.3:
        body["prompt"] = draw.choice([[5] * draw.randint(1, 700), [[5], [6]], ["a", "b"], *SAID])
    for name in draw.sample(fields[path], draw.choice([0, 1, 1, 2, 3])):
        body[name] = draw.choice([odd(draw), draw.choice(NUMBERS), draw.choice([True, 1, 0, "x"])])
    sent = json.dumps(body).encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(sent))
        sent = draw.choice([sent[:at], sent[:at] + b"\xff" + sent[at:], b"[" * 10**5, sent * 3])
    return path, sent


def fields_of(served: Any) -> dict[str, list[str]]:
    """What the routes say that they take, and some that they do not."""
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    more = ["echo", "best_of", "response_format", "no_such", "\ud800", "generation_config", "chat_template"]
    return {
        path: [*schemas[name]["properties"], *more]
        for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest"))
    }


def attack(served: Any, requests: int, at_once: int) -> Counter[int]:
    """Statuses of odd requests."""
    draw, fields = random.Random(58), fields_of(served)
    bodies = [odd_body(draw, fields) for _ in range(requests)]

    def ask(request: tuple[str, bytes]) -> int:
        got = served.http.post(request[0], content=request[1], headers={"Content-Type": "application/json"})
        if got.status_code != 200:
            assert set(got.json()["error"]) == {"message", "type", "param", "code"}, request
        assert got.status_code < 500, (request, got.text)
        return int(got.status_code)

    with ThreadPoolExecutor(at_once) as threads:
        return Counter(threads.map(ask, bodies))


def clients(served: Any, count: int, broken: int) -> list[str]:
    """So many at once, of which some break their connection off; what the others are told, streamed or not."""
    answers: dict[int, str] = {}

    def one(number: int) -> None:
        body: dict[str, Any] = {"model": "embedded", "prompt": talking.prompt(number % 7), "max_tokens": 4 + number % 5}
        if number < broken:
            break_off(served, body | {"max_tokens": talking.MOST, "stream": number % 2 == 0})
        elif number % 2:
            parts = served.client.completions.create(**body, stream=True)
            answers[number] = "".join(part.choices[0].text for part in parts)
        else:
            answers[number] = served.client.completions.create(**body).choices[0].text

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(one, range(count)))
    wanted = {at: talking.expected(talking.prompt(at % 7), 4 + at % 5) for at in range(broken, count)}
    return [f"{at}: {answers[at]!r}, not {text!r}" for at, text in wanted.items() if answers[at] != text]


def break_off(served: Any, body: dict[str, Any]) -> None:
    """Kill the connection, without a word: of a stream in the middle of it, else soon."""
    with socket.create_connection((served.host, served.port)) as connection:
        connection.sendall(talking.request(body))
        time.sleep(0.05)
        while body["stream"] and b"text_completion" not in connection.recv(1 << 16):
            pass
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drain(served: Any, count: int) -> list[str]:
    """The server is told to stop while it answers: how these answers end. New ones are not begun."""
    ends: list[str] = []
    begun = threading.Semaphore(0)

    def one(number: int) -> None:
        parts = served.client.completions.create(
            model="embedded", prompt=talking.prompt(number % 7), max_tokens=20, stream=True
        )
        for part in parts:
            begun.release()
            if part.choices[0].finish_reason:
                ends.append(part.choices[0].finish_reason)

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(one, number) for number in range(count)]
        for _ in range(count):
            begun.acquire()
        served.server.should_exit = True
        for future in futures:
            future.result()
    served.thread.join()
    with pytest.raises(served.openai.APIConnectionError):
        served.client.completions.create(model="embedded", prompt="x", max_tokens=1)
    return ends


def check(requests: int, at_once: int, count: int, broken: int, until_the_end: int) -> None:
    with talking.serving(grace=60.0, max_queue=1000) as served:
        statuses = attack(served, requests, at_once)
        free = talking.wait_until_free(served)
        differing = clients(served, count, broken)
        after = talking.wait_until_free(served)
        ends = drain(served, until_the_end)
    print(f"\n{requests} odd requests: {dict(sorted(statuses.items()))}; {count} clients, {broken} broken off:")
    print(f"{len(differing)} others differ; cancelled {after.get(_CANCELLED, 0):.0f}; at the end {Counter(ends)}")
    assert sum(statuses.values()) == requests
    assert statuses[200] > requests // 20
    assert statuses[400] > requests // 4
    assert free['refused_requests_total{status="400"}'] == statuses[400]
    assert not differing
    assert after[_CANCELLED] >= broken // 2
    assert ends == ["length"] * until_the_end
    assert 'answers_total{end="failed"}' not in after


_CANCELLED = 'answers_total{end="cancelled"}'


def test_a_small_attack() -> None:
    check(40, 4, 6, 3, 2)


@pytest.mark.load
def test_an_attack() -> None:
    check(500, 16, 64, 40, 8)
