"""A server on the embedded model, in a thread of this process, and what is needed to talk to it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driving import alone

#: Of the cache.
OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "calibrated:embedded"}
CHUNK, MOST, LONGEST = 16, 120, 600
#: Tokens of answers that were worked out already, by prompt.
_ALONE: dict[str, list[int]] = {}
PLACES = "The harbour lies north of the mill. The key is under the third stone by the well. Nobody asked why. "


def prompt(number: int) -> str:
    """Some questions of different lengths."""
    return f"{number} " + PLACES * (1 + number % 3) + "Where is the key? The key is"


@cache
def embedded() -> Any:
    """Model and tokenizer; in float64, so that no last bit decides between two tokens."""
    from hf_paged_eviction_eval.embedded import load

    return load(torch.float64)


def expected(text: str, new: int) -> str:
    """What the request gives by itself: the beginning of what it gives where more is asked for."""
    model, tokenizer = embedded()
    if len(_ALONE.get(text, [])) < new:
        _ALONE[text] = alone(model, tokenizer(text)["input_ids"], new, prefill_chunk_size=CHUNK, **OPTIONS)
    return str(tokenizer.decode(_ALONE[text][:new], skip_special_tokens=True))


@contextmanager
def serving(**options: Any) -> Iterator[Any]:
    """A server, its address and a client."""
    for name in ("openai", "fastapi", "uvicorn", "httpx", "prometheus_client"):
        pytest.importorskip(name, reason="the extra `serve` is not installed")
    import httpx
    import openai

    from hf_paged_eviction_server import server as module
    from hf_paged_eviction_server.options import ServeOptions

    defaults = {"model": "embedded", "port": 0, "pages": 10, "page_size": 16, "batch_tokens": 24, "quiet": True}
    limits = {"max_new_tokens": MOST, "max_prompt_tokens": LONGEST, "prefill_chunk_size": CHUNK}
    wanted = ServeOptions(**{**defaults, **limits, **OPTIONS, **options})
    ready: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_model", lambda settings: embedded()[0])
        patch.setattr(module, "_AFTER_GRACE", 300.0)  # after it a server ends its process: this one
        thread = threading.Thread(target=module.serve, args=(wanted, ready.append), daemon=True)
        thread.start()
        while not (ready and ready[0].started):
            assert thread.is_alive()
            time.sleep(0.02)
        (listening,) = [socket for server in ready[0].servers for socket in server.sockets][:1]
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        with httpx.Client(base_url=url, timeout=600) as http, client:
            yield SimpleNamespace(
                url=url, host=host, port=port, client=client, openai=openai, http=http, server=ready[0], thread=thread
            )
        if not ready[0].should_exit:
            ready[0].should_exit = True
        thread.join()


def request(body: dict[str, Any]) -> bytes:
    """A request for a completion, as it is sent."""
    sent = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


def manager() -> Any:
    """That of the server that runs."""
    (running,) = vars(embedded()[0])["init_continuous_batching"].__self__._managers
    return running


@contextmanager
def steps(before: Callable[[], Any]) -> Iterator[None]:
    """This is called before each forward, by the thread that generates."""
    running = manager()
    step = running._generation_step

    def waiting_step() -> None:
        before()
        step()

    running._generation_step = waiting_step
    try:
        yield
    finally:
        running._generation_step = step


def numbers(served: Any) -> dict[str, float]:
    """What `/metrics` says."""
    lines = served.http.get("/metrics").text.splitlines()
    pairs = [line.removeprefix("paged_eviction_").rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def wait_until_free(served: Any) -> dict[str, float]:
    """Until nobody owns a page."""
    while True:
        now = numbers(served)
        if now["pages_in_use"] == now["live_requests"] == now["waiting_requests"] == 0:
            return now
        assert served.thread.is_alive()
        time.sleep(0.02)
