"""A full queue, and the end: with what was begun, and at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import driving
import pytest
from talking import MOST, prompt, serving, steps

pytest.importorskip("typer", reason="the extra `eval` is not installed")

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 12}


def test_queue_and_end() -> None:
    """A full queue is said; told to stop, a server takes nothing on, finishes what is short and ends what is long."""
    # Forwards of 50 ms: on no machine is an answer of so many complete within the second.
    with serving(max_queue=3, grace=1.0) as served, steps(lambda: time.sleep(0.05)):
        long = served.client.completions.create(**TEXT | {"max_tokens": MOST, "n": 2}, stream=True)
        next(iter(long))
        with pytest.raises(served.openai.RateLimitError, match="try later") as told:
            served.client.completions.create(**TEXT | {"n": 2})
        assert told.value.response.headers["retry-after"] == "1"
        served.server.handle_exit(15, None)
        with pytest.raises((served.openai.InternalServerError, served.openai.APIConnectionError)) as ending:
            served.client.completions.create(**TEXT)
        if isinstance(ending.value, served.openai.InternalServerError):
            assert ending.value.response.headers["retry-after"] == "10"
        with pytest.raises(served.openai.APIError, match="stopped before the answer was complete"):
            list(long)
        served.thread.join()


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from types import SimpleNamespace

    from hf_paged_eviction_eval.options.serve import ServeOptions
    from hf_paged_eviction_eval.serving import server as module

    left: list[int] = []
    monkeypatch.setattr(module, "leave", left.append)
    engine = SimpleNamespace(close=lambda: None)
    server = module._server(None, engine, ServeOptions(model="embedded", budget=32))
    server.handle_exit(15, None)
    assert (server.should_exit, left) == (True, [])
    server.handle_exit(15, None)
    assert left == [143]


def test_sigterm() -> None:
    """A process that reads a long prompt for a client that has gone, and answers another, ends in time."""
    httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    command = [sys.executable, "-m", "hf_paged_eviction_eval", "serve", "--model", "embedded", "--budget", "64"]
    command += ["--port", "0", "--grace", "0.5", "--prefill-chunk-size", "16"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "running on" in line or not line)
        url = next(word for word in said.split() if word.startswith("http"))
        body, impatient = TEXT | {"max_tokens": 4000, "stream": True}, httpx.Timeout(600, read=0.05)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            lines = answer.iter_lines()
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": [5] * 4000}, timeout=impatient)
            process.send_signal(signal.SIGTERM)
            ended = [line for line in lines if line][-1]
        assert "stopped before the answer was complete" in ended
        process.stderr.read()
    assert process.returncode == 0
