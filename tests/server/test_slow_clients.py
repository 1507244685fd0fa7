"""Clients that send and never read, read slowly, or send half of what they began."""

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from talking import expected, numbers, prompt, request, serving, wait_until_free

import driving
from processes import wait_for

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 12}
#: More than the buffers of two sockets hold.
LONG = TEXT | {"max_tokens": 60, "n": 2, "logprobs": 20, "temperature": 1, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, serving(max_queue=4) as server:
        from hf_paged_eviction_server import body, patience

        connection_made = patience.PatientProtocol.connection_made

        def small(protocol: Any, transport: Any) -> None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection_made(protocol, transport)

        patch.setattr(patience.PatientProtocol, "connection_made", small)
        patch.setattr(patience, "LOOK", 0.5)
        patch.setattr(body, "SECONDS", 1.0)
        yield server


def connected(served: Any, sent: bytes) -> socket.socket:
    """A connection with small buffers on which this was sent."""
    connection = socket.socket(socket.AF_INET6 if ":" in served.host else socket.AF_INET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((served.host, served.port))
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has gone; what came is read."""
    connection.settimeout(0.1)
    try:
        return connection.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads(served: Any, stream: bool) -> None:
    """It gives up its places in the queue, and its connection."""
    with connected(served, request(LONG | {"stream": stream})) as connection:
        wait_for(lambda: numbers(served)["live_requests"] > 0)
        wait_until_free(served)
        wait_for(lambda: not served.server.server_state.connections or len(served.server.server_state.connections) == 1)
        assert served.client.completions.create(**TEXT | {"n": 4}).choices[0].text == expected(prompt(1), 12)
        wait_for(lambda: is_closed(connection))


def test_a_client_that_reads_slowly(served: Any) -> None:
    """As long as it reads, it is served to the end and gets every token, in however many pieces."""
    with connected(served, request(LONG | {"stream": True, "seed": 1})) as connection:
        got = bytearray()
        while part := connection.recv(1 << 12):
            got += part
            time.sleep(0.05)
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})\n", got)]
    tokens = [token for event in events for choice in event["choices"] for token in choice["logprobs"]["tokens"]]
    assert got.rstrip().endswith(b"[DONE]\n\n\r\n0") and len(tokens) == LONG["n"] * LONG["max_tokens"]
    wait_until_free(served)


def test_half_a_head(served: Any) -> None:
    """Lines of a request that never end, sent at once or letter by letter, before or behind a whole one."""
    whole = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for begun in ("", "GET /health HTTP/1.1\r\nHo", f"{whole}GET /he"):
        with connected(served, begun.encode()) as connection:

            def drips(connection: socket.socket = connection) -> bool:
                try:
                    connection.send(b"x")
                except OSError:
                    return True
                return is_closed(connection)

            wait_for(drips if begun else lambda connection=connection: is_closed(connection))


def test_half_a_body(served: Any) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with connected(served, head.encode()) as connection:
        connection.settimeout(60)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 408 ")
        wait_for(lambda: is_closed(connection))
    assert served.client.completions.create(**TEXT).choices[0].text == expected(prompt(1), 12)
