"""Bodies as well-meaning clients send them are answered; texts without bytes are refused, in whatever field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from talking import PLACES, expected, numbers, prompt, serving, wait_until_free

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

CHAT: dict[str, Any] = {"model": "embedded", "messages": [{"role": "user", "content": PLACES}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 4}
USER, SAID = CHAT["messages"][0], "The key is"

#: Changes of a chat that ask for nothing else than the chat itself.
SAME_CHATS: dict[str, dict[str, Any]] = {
    "curl": {"temperature": 0},
    "numbers of JavaScript": {"max_tokens": 2.0, "n": 1.0, "temperature": 0.0, "top_k": -1.0, "seed": 7.0},
    "openai, all that it knows": dict.fromkeys(
        (
            "audio frequency_penalty function_call functions logit_bias logprobs metadata modalities tools "
            "top_logprobs max_completion_tokens n parallel_tool_calls prediction presence_penalty reasoning_effort "
            "response_format seed service_tier stop store stream stream_options temperature tool_choice top_p user "
            "verbosity web_search_options prompt_cache_key"
        ).split()
    ),
    "neutral": {
        **{"response_format": {"type": "text"}, "tools": [], "user": "a", "store": False, "n": None, "top_k": -1},
        **{"min_p": 0, "length_penalty": 1, "ignore_eos": False, "priority": 0, "safety_identifier": "a"},
        **{"prompt_cache_key": "b", "logprobs": False, "top_logprobs": 0, "max_completion_tokens": 2},
    },
    "LangChain": {"n": 1, "stream": False, "stop": None, "logit_bias": None, "frequency_penalty": 0, "top_p": 1},
    "LiteLLM": {"extra_body": {}, "extra_headers": None, "metadata": {"a": "b"}, "user": "", "stop": []},
    "vLLM": {"skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "guided_json": None, "top_k": -1},
    "text asked for": {"response_format": {"type": "text"}, "modalities": ["text"], "store": False},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": PLACES}]}]},
    "two parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in ("", PLACES)]}]},
    "a hint of caching": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": PLACES, "cache_control": {"type": "ephemeral"}}]}
        ]
    },
    "nulls of a message": {
        "messages": [USER | dict.fromkeys(("name", "tool_calls", "function_call", "audio", "refusal"))]
    },
    "no choice of likely tokens": {"top_p": 0, "temperature": 1},
}
#: Ways to send back an answer of before.
SENT_BACK: dict[str, dict[str, Any]] = {
    "plain": {},
    "openai": {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    "LiteLLM": {"provider_specific_fields": {"refusal": None, "reasoning_content": None}, "thinking_blocks": []},
    "reasoning": {"reasoning_content": None, "reasoning": None, "reasoning_details": []},
    "parts": {"content": [{"type": "text", "text": SAID, "annotations": []}]},
    "no calls": {"tool_calls": []},
}
SAME_TEXTS: dict[str, dict[str, Any]] = {
    "curl": {"temperature": 0},
    "openai": dict.fromkeys(
        "best_of echo frequency_penalty logit_bias logprobs n seed stop stream suffix user".split()
    ),
    "legacy": {"best_of": 1, "echo": False, "suffix": "", "n": 1, "presence_penalty": 0.0, "logprobs": None},
    "numbers of JavaScript": {"max_tokens": 4.0, "best_of": 1.0, "top_p": 1.0, "stop_token_ids": []},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with serving() as server:
        yield server


def answer(served: Any, path: str, body: dict[str, Any]) -> Any:
    got = served.http.post(path, json=body)
    assert got.status_code == 200, got.text
    choice = got.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("change", SAME_CHATS.values(), ids=SAME_CHATS)
def test_a_chat_of_every_client(served: Any, change: dict[str, Any]) -> None:
    assert answer(served, "/v1/chat/completions", CHAT | change) == answer(served, "/v1/chat/completions", CHAT)


@pytest.mark.parametrize("change", SENT_BACK.values(), ids=SENT_BACK)
def test_an_answer_that_comes_back(served: Any, change: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": SAID}
    bodies = [CHAT | {"messages": [USER, message, USER]} for message in (said, said | change)]
    first, second = (answer(served, "/v1/chat/completions", body) for body in bodies)
    assert first == second


@pytest.mark.parametrize("change", SAME_TEXTS.values(), ids=SAME_TEXTS)
def test_a_text_of_every_client(served: Any, change: dict[str, Any]) -> None:
    assert answer(served, "/v1/completions", TEXT | change) == expected(prompt(1), 4)


def spoiled(value: Any) -> Iterator[Any]:
    """The value with each of its texts, and names, made one without bytes."""
    if isinstance(value, str):
        yield value + "\udfff"
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in spoiled(inner))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from (value | {name: other} for other in spoiled(inner))
        yield value | {"\udfff": "x"}


FULL_CHAT = CHAT | {
    "messages": [
        {"role": "system", "content": "a", "name": "b"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": ["b"]}}}],
    "chat_template_kwargs": {"bos_token": "a"},
    "protect": ["system"],
    "stream_options": {},
    "tool_choice": "auto",
}  # fmt: skip
COMMON: dict[str, Any] = {
    **{name: "a" for name in ("context", "prompt_cache_key", "user", "safety_identifier", "request_id", "stop")},
    **{"metadata": {"a": "b"}, "logit_bias": {"1": 0}, "response_format": {"type": "text"}, "service_tier": "auto"},
}
BODIES = {
    "/v1/chat/completions": FULL_CHAT | COMMON,
    "/v1/completions": TEXT | COMMON | {"suffix": "", "prompt": ["a"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_text_without_bytes_is_refused_in_every_field(served: Any, path: str) -> None:
    before, count = numbers(served)["admitted_requests_total"], 0
    for body in spoiled(BODIES[path]):
        sent = json.dumps(body).encode()
        got = served.http.post(path, content=sent, headers={"Content-Type": "application/json"})
        assert (got.status_code, "Unicode" in got.text) == (400, True), (body, got.text)
        count += 1
    assert count > 15
    assert numbers(served)["admitted_requests_total"] == before
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("inner", ["NaN", "9" * 5000, '"\\udfff"', "[Infinity]", '{"\\udffe": {"a": NaN}}'])
def test_a_field_whose_name_cannot_be_shown(served: Any, inner: str) -> None:
    """What is wrong in it is refused, and not a failure of the server."""
    for path, name in (
        ("/v1/completions", "protect"),
        ("/v1/completions", "metadata"),
        ("/v1/chat/completions", "user"),
    ):
        body = json.dumps(BODIES[path] | {name: {"\udfff": "here"}}).replace('"here"', inner)
        got = served.http.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
        assert got.status_code == 400, got.text


@pytest.mark.parametrize("number", [2.0**31, 2**31, 2**32, 2**63, -(2**63), 10**30, 1e300, -1, 0, 0.0, 1e-320])
def test_numbers_of_any_size_in_every_field(served: Any, number: float) -> None:
    """Refused, or what there is room for; no failure of the server, and the others never notice."""
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    for path, name, body in (
        ("/v1/completions", "CompletionRequest", TEXT | {"max_tokens": 2}),
        ("/v1/chat/completions", "ChatRequest", CHAT),
    ):
        for field in schemas[name]["properties"]:
            for value in (number, [number], [[0, number]], [[number, number]], {"1": number}, {"a": number}):
                if field in ("max_tokens", "max_completion_tokens") and value == number:
                    continue  # see test_server.py
                got = served.http.post(path, json=body | {field: value})
                assert got.status_code in (200, 400, 404), (field, value, got.text)
    assert answer(served, "/v1/completions", TEXT) == expected(prompt(1), 4)
    wait_until_free(served)
