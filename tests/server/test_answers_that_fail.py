"""A fault in one request's answer is a 500 for that request."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
from talking import expected, prompt, serving, wait_until_free

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

TEXT: dict[str, Any] = {"model": "embedded", "max_tokens": 6, "logprobs": 1}
#: Every call for one request, of the server and of serving: module, class, methods.
CALLS = {
    "hf_paged_eviction_server.answers.Answer": "__init__ hear _written _piece",
    "hf_paged_eviction_server.answers.CompletionForm": "_choice _logprobs",
    "hf_paged_eviction_server.text.TextStream": "add end _release",
    "hf_paged_eviction_server.names.TokenNames": "name",
    "hf_paged_eviction_server.prompts.Prompts": "most_new check_tokens decode _text",
    "hf_paged_eviction_server.engine.Engine": "check_sizes check_queue open",
    "hf_paged_eviction_server.engine.Job": "ask reserve",
    "hf_paged_eviction.serving.manager.BoundedManager": "add_request",
    "hf_paged_eviction.serving.allocator.BoundedAllocator": "prepare plan",
    "hf_paged_eviction.serving.prefixes.Prefixes": "digests match",
    "hf_paged_eviction.serving.step.Step": "add",
    "hf_paged_eviction.serving.stock_step.StockStep": "_attend_together",
    "hf_paged_eviction.serving.request_table.RequestTable": "add",
    "hf_paged_eviction_server.sampling.Sampler": "choose _note sibling",
}
CASES = [(path, name) for path, names in CALLS.items() for name in names.split()]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with serving() as server:
        yield server


def ask(served: Any, number: int, stream: bool) -> tuple[int, str]:
    """Status and text of a request; the status of a stream is that of its error, if it has one."""
    body = TEXT | {"prompt": prompt(number), "stream": stream}
    with suppress(served.openai.APIConnectionError):
        got = served.http.post("/v1/completions", json=body)
        if not stream:
            return got.status_code, got.json()["choices"][0]["text"] if got.status_code == 200 else got.text
        events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
        if got.status_code != 200 or "error" in events[-1]:
            return got.status_code if got.status_code != 200 else 500, got.text
        return 200, "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "name"), CASES, ids=[name for _, name in CASES])
def test_one_fault_fails_one_request(
    served: Any, path: str, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, owner = path.rpartition(".")
    cls, lock = getattr(import_module(module), owner), threading.Lock()
    method, left = getattr(cls, name), [1]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        with lock:
            fails, left[0] = left[0] == 1, 0
        if fails:
            raise ZeroDivisionError("a fault")
        return method(*args, **kwargs)

    monkeypatch.setattr(cls, name, faulty)
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda number: ask(served, number, stream), range(3)))
    assert left[0] == 0, "never called, so that this test says nothing"
    statuses = sorted(status for status, _ in got)
    # What a tokenizer raises for a text is a refusal of that text.
    assert statuses == [200, 200, 400 if name == "_text" else 500], got
    for number, (status, text) in enumerate(got):
        assert status != 200 or text == expected(prompt(number), 6)
    assert served.http.get("/health").json() == {"status": "ok"}
    wait_until_free(served)
    assert not served.server.config.app.state.served.engine._jobs
