"""The server over HTTP, with the client that everybody uses, on the embedded model."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import driving
import pytest
import torch
from driving import alone

pytest.importorskip("typer", reason="the extra `eval` is not installed")

from typer.testing import CliRunner

from hf_paged_eviction_eval.commands import app

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}
CHUNK, MOST = 16, 400
PLACES = "The harbour lies north of the mill. The key is under the third stone by the well. Nobody asked why. "


def prompt(number: int) -> str:
    return f"{number} " + PLACES * (1 + number % 3) + "Where is the key? The key is"


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A server in a thread, and what is needed to talk to it."""
    openai = pytest.importorskip("openai", reason="the extra `serve` is not installed")
    for name in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(name, reason="the extra `serve` is not installed")
    from hf_paged_eviction_eval.serving.server import serve

    ready: list[Any] = []
    arguments = ["--port", "0", "--dtype", "float64", "--device", "cpu"]
    arguments += ["--cb-block-size", "16", "--cb-num-blocks", "10", "--cb-max-batch-tokens", "24"]

    def run() -> None:
        with suppress(SystemExit):  # with which a command ends
            serve("embedded", arguments, MOST, ready.append, prefill_chunk_size=CHUNK, **OPTIONS)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not (ready and getattr(ready[0].server, "started", False)):
        assert thread.is_alive()
        time.sleep(0.05)
    (listening,) = [socket for server in ready[0].server.servers for socket in server.sockets][:1]
    host, port = listening.getsockname()[:2]
    url = f"http://localhost:{port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    yield SimpleNamespace(url=url, host=host, client=client, openai=openai, serve=ready[0])
    ready[0].server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()


def expected(text: str, new: int) -> str:
    model, tokenizer = embedded()
    tokens = alone(model, tokenizer(text)["input_ids"], new, prefill_chunk_size=CHUNK, **OPTIONS)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def embedded() -> Any:
    from hf_paged_eviction_eval.embedded import load

    if not _EMBEDDED:
        _EMBEDDED.append(load(torch.float64))
    return _EMBEDDED[0]


_EMBEDDED: list[Any] = []


def numbers(served: Any) -> dict[str, int]:
    import httpx

    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    pairs = [line.removeprefix("paged_eviction_").split() for line in lines if not line.startswith("#")]
    return {name: int(value) for name, value in pairs}


def wait_until_free(served: Any) -> dict[str, int]:
    for _ in range(200):
        now = numbers(served)
        if now["pages_in_use"] == now["live_requests"] == now["waiting_requests"] == 0:
            return now
        time.sleep(0.05)
    raise AssertionError(now)


def post(served: Any, path: str, body: Any, **headers: str) -> Any:
    import httpx

    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def test_streams_at_once(served: Any) -> None:
    """Every answer, streamed or not, is the lone one."""

    async def ask(client: Any, number: int) -> str:
        wanted = {"model": "embedded", "prompt": prompt(number), "max_tokens": 12 + number}
        if number % 2:
            return str((await client.completions.create(**wanted)).choices[0].text)
        parts = await client.completions.create(**wanted, stream=True)
        return "".join([part.choices[0].text or "" async for part in parts])

    async def ask_all() -> list[str]:
        url = served.client.base_url
        async with served.openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(5)))

    assert asyncio.run(ask_all()) == [expected(prompt(number), 12 + number) for number in range(5)]
    after = wait_until_free(served)
    assert after["tokens_evicted_total"] > 0
    assert after["requests_total"] >= 5
    assert (after["pages"], after["page_tokens"]) == (10, 16)


def test_chat(served: Any) -> None:
    asked = [{"role": "user", "content": PLACES + "Where is the key?"}]
    answer = served.client.chat.completions.create(model="embedded", messages=asked, max_tokens=8)
    model, tokenizer = embedded()
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens = alone(model, ids, 8, prefill_chunk_size=CHUNK, **OPTIONS)
    ends = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    assert (
        answer.choices[0].message.content.strip() == tokenizer.decode(tokens[:ends], skip_special_tokens=True).strip()
    )


def test_a_client_that_goes_away(served: Any) -> None:
    parts = served.client.completions.create(model="embedded", prompt=prompt(1), max_tokens=MOST, stream=True)
    for _, _ in zip(range(3), parts, strict=False):
        pass
    assert numbers(served)["live_requests"] == 1
    parts.close()
    wait_until_free(served)


HOSTILE: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"model": "no/such/model", "prompt": "x"}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400),
    ("/v1/completions", {"prompt": "x", "generation_config": "{no json"}, 400),
    ("/v1/completions", {"prompt": "x", "generation_config": '{"num_beams": 4, "max_new_tokens": 9}'}, 400),
    ("/v1/completions", {"prompt": ["a", "b"]}, 400),
    ("/v1/completions", {"prompt": "x", "no_such_field": 1}, 422),
    ("/reset", {}, 403),
    ("/load_model", {"model": "some/other"}, 403),
]


@pytest.mark.parametrize(("path", "body", "status"), HOSTILE)
def test_hostile(served: Any, path: str, body: dict[str, Any], status: int) -> None:
    """An error, no pages, and the others never notice."""
    if body.get("generation_config"):
        body = body | {"model": "embedded"}
    got = post(served, path, body)
    assert got.status_code == status, got.text
    wait_until_free(served)
    answer = served.client.completions.create(model="embedded", prompt=prompt(2), max_tokens=5)
    assert answer.choices[0].text == expected(prompt(2), 5)


def test_a_prompt_without_tokens(served: Any) -> None:
    """The embedded tokenizer adds one to any text; others do not."""
    from fastapi import HTTPException

    state = served.serve._generation_state
    for generate in (state._cb_manager.generate_streaming, state._cb_manager.generate_non_streaming):
        with pytest.raises(HTTPException, match="prompt is empty"):
            generate(None, None, {"input_ids": []}, None, "no-name")


def test_a_refusal_is_heard(served: Any) -> None:
    """A result that comes before its handler is registered is not lost."""
    batching = served.serve._generation_state._cb_manager._cb

    async def refused() -> str:
        batching.add_request([10**7], request_id="early", max_new_tokens=1)
        while batching.output_router.output_queue.empty():
            await asyncio.sleep(0.01)
        heard = asyncio.get_running_loop().create_future()
        batching.register_result_handler("early", heard.set_result)
        return str((await asyncio.wait_for(heard, 10)).error)

    assert "is none of the model's" in asyncio.run(refused())


def test_a_name_twice(served: Any) -> None:
    name = str(uuid.uuid4())
    parts = served.client.completions.create(
        model="embedded", prompt=prompt(1), max_tokens=60, stream=True, extra_headers={"X-Request-ID": name}
    )
    got = post(served, "/v1/completions", {"prompt": "x"}, **{"X-Request-ID": name})
    assert got.status_code == 409
    assert "".join(part.choices[0].text or "" for part in parts) == expected(prompt(1), 60)
    wait_until_free(served)
    assert (
        post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"X-Request-ID": name}).status_code == 200
    )


def test_local_only(served: Any) -> None:
    assert served.host in ("127.0.0.1", "::1")


def test_nothing_is_ignored_in_silence(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        served.client.completions.create(model="embedded", prompt="x", max_tokens=1, temperature=0.123)
    said = [record.getMessage() for record in caplog.records if "temperature=0.123" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "embedded", "--budget", "64", "--compile"], "--compile does not go with eviction"),
        (["--model", "embedded"], "--budget"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    result = CliRunner().invoke(app, ["serve", "--model", "embedded", "--budget", "64"])
    assert result.exit_code == 2
    assert "pip install 'hf_paged_eviction[eval,serve]'" in result.stderr.replace("\n", "")
