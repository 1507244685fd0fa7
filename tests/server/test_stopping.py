"""A full queue, and the end: with what was begun, and at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from talking import MOST, prompt, serving, steps

import driving
from processes import Child, Commands, wait_for

pytest.importorskip("typer", reason="the extra `eval` is not installed")

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 12}


def test_queue_and_end() -> None:
    """A full queue is said; told to stop, a server takes nothing on, finishes what is short and ends what is long."""
    # Forwards of 50 ms: on no machine is an answer of so many complete within the second.
    with serving(max_queue=3, grace=1.0) as served, steps(lambda: time.sleep(0.05)):
        long = served.client.completions.create(**TEXT | {"max_tokens": MOST, "n": 2}, stream=True)
        next(iter(long))
        with pytest.raises(served.openai.RateLimitError, match="Try again later") as refused:
            served.client.completions.create(**TEXT | {"n": 2})
        assert refused.value.response.headers["retry-after"] == "1"
        served.server.handle_exit(15, None)
        with pytest.raises((served.openai.InternalServerError, served.openai.APIConnectionError)) as ending:
            served.client.completions.create(**TEXT)
        if isinstance(ending.value, served.openai.InternalServerError):
            assert ending.value.response.headers["retry-after"] == "10"
        with pytest.raises(served.openai.APIError, match="complete"):
            list(long)
        served.thread.join()


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from types import SimpleNamespace

    from hf_paged_eviction_server import server as module
    from hf_paged_eviction_server.options import ServeOptions

    left: list[int] = []
    monkeypatch.setattr(module, "leave", left.append)
    engine = SimpleNamespace(close=lambda: None, dead=False)
    server = module._server(None, engine, ServeOptions(model="embedded", budget=32))
    server.handle_exit(15, None)
    assert (server.should_exit, left) == (True, [])
    server.handle_exit(15, None)
    assert left == [143]


@pytest.fixture
def process(commands: Commands) -> Iterator[tuple[Child, str]]:
    """A server in a process of its own, and its address."""
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    words = "serve --model embedded --budget 64 --port 0 --grace 0.5 --prefill-chunk-size 16 --max-prompt-tokens 8000"
    started = commands.start(words.split())
    wait_for(lambda: "running on" in started.output or "Traceback" in started.output)
    yield started, next(word for word in started.output.split() if word.startswith("http"))
    with suppress(ProcessLookupError):  # it has ended
        started.kill()


def test_sigterm(process: tuple[Child, str]) -> None:
    """A process that reads a long prompt for a client that has gone, and answers another, ends in time."""
    httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
    started, url = process
    body, impatient = TEXT | {"max_tokens": 4000, "stream": True}, httpx.Timeout(600, read=0.05)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        lines = answer.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": [5] * 4000}, timeout=impatient)
        os.kill(started.pid, signal.SIGTERM)
        sent = time.monotonic()
        ended = [line for line in lines if line][-1]
    assert "stopped before the answer was complete" in ended
    assert started.wait() == 0
    assert time.monotonic() - sent < 60, "far more than grace, and what a busy machine needs, and less than the answer"


def test_while_a_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that goes on for long holds up nothing: its client is told, and the process ends in time.

    A client that went away before its turn came is not read for.
    """
    import httpx

    left, go_on, texts = [], threading.Event(), []
    with serving(grace=0.5) as served, ThreadPoolExecutor(1) as clients:
        from hf_paged_eviction_server import server as module

        def read(special: bool, text: str) -> list[int]:
            texts.append(text)
            go_on.wait()
            return [5]

        monkeypatch.setattr(module, "leave", left.append)
        monkeypatch.setattr(module, "_AFTER_GRACE", 1.0)
        monkeypatch.setattr(served.server.config.app.state.served.prompts, "_text", read)
        waiting = clients.submit(served.http.post, "/v1/completions", json=TEXT | {"prompt": "long"})
        wait_for(lambda: texts == ["long"])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=TEXT | {"prompt": "gone"}, timeout=0.5)
        served.server.handle_exit(15, None)
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        wait_for(lambda: bool(left))
        go_on.set()
        served.thread.join()
    assert set(left) == {0}
    assert texts == ["long"]


def test_the_process_ends_with_a_status(commands: Commands, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
    (tmp_path / "broken_server.py").write_text(
        "from hf_paged_eviction.serving.stock_step import StockStep\n"
        "from hf_paged_eviction_eval.commands import app\n"
        "def attend(*_): raise RuntimeError('the device has gone')\n"
        "def run(words):\n"
        "    from hf_paged_eviction_server import server\n"
        "    inner = server._announcement\n"
        "    def announce(*given):\n"
        "        StockStep.attend = attend\n"
        "        return inner(*given)\n"
        "    server._announcement = announce\n"
        "    app(words)\n"
    )
    words = "serve --model embedded --budget 64 --port 0 --grace 5 --max-prompt-tokens 800".split()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import broken_server; broken_server.run({words!r})"
    started = commands.start(code, main="builtins:exec")  # type: ignore[arg-type]
    try:
        wait_for(lambda: "running on" in started.output or "Traceback" in started.output)
        url = next(word for word in started.output.split() if word.startswith("http"))
        got = httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": "a"}, timeout=600)
        assert got.status_code >= 500
        assert started.wait() == 1, started.output
        assert "the server ends" in started.output
    finally:
        with suppress(ProcessLookupError):
            started.kill()
