"""The server over HTTP, with the client that everybody uses, on the embedded model."""

import asyncio
import itertools
import json
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from talking import (
    CHUNK,
    LONGEST,
    MOST,
    OPTIONS,
    PLACES,
    embedded,
    expected,
    manager,
    numbers,
    prompt,
    request,
    serving,
    steps,
    wait_until_free,
)

import driving
from processes import wait_for

pytest.importorskip("typer", reason="the extra `eval` is not installed")

from typer.testing import CliRunner

from hf_paged_eviction_eval.commands import app

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

CHAT: dict[str, Any] = {"model": "embedded", "messages": [{"role": "user", "content": PLACES + "Where is the key?"}]}
TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 12}


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with serving() as server:
        yield server


# ---- who comes in -----------------------------------------------------------------------------------------------


def test_only_these_routes(served: Any) -> None:
    routes = {(method, route.path) for route in served.server.config.app.routes for method in route.methods}
    writes, reads = {"POST", "OPTIONS"}, {"GET", "HEAD", "OPTIONS"}
    expected_methods = {"/v1/chat/completions": writes, "/v1/completions": writes, "/openapi.json": reads}
    expected_methods |= dict.fromkeys(("/v1/models", "/v1/models/{name:path}", "/metrics", "/health"), reads)
    assert routes == {(method, path) for path, methods in expected_methods.items() for method in methods}
    for path, methods in expected_methods.items():
        answer = served.http.options(path.replace("{name:path}", "embedded"))
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (204, methods)
        assert "access-control-allow-origin" not in answer.headers
    for path in ("/health", "/v1/models", "/metrics", "/v1/models/embedded"):
        head, whole = served.http.head(path), served.http.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") and whole.content
    refused = served.http.get("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_no_route_loads_a_model(served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    loaded: list[Any] = []
    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", lambda *args, **kwargs: loaded.append(args))
    folder = str(tmp_path)
    audio = {"file": ("a.wav", b"RIFF", "audio/wav")}
    answers = [served.http.post("/v1/audio/transcriptions", data={"model": folder}, files=audio)]
    for path in ("/v1/responses", "/load_model", "/reset", "/v1/embeddings", "/docs", "/v1/../etc/passwd"):
        answers.append(served.http.post(path, json={"model": folder}))
    for body in (CHAT, TEXT):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answers.append(served.http.post(path, json=body | {"model": folder}))
        answers.append(served.http.post(path, data={"model": folder}))
    answers.append(served.http.get(f"/v1/models/{folder}"))
    assert [answer.status_code for answer in answers] == [404] * 7 + [404, 415] * 2 + [404]
    assert all(set(answer.json()["error"]) == {"message", "type", "param", "code"} for answer in answers)
    assert not loaded


def test_models(served: Any) -> None:
    assert [model.id for model in served.client.models.list()] == ["embedded"]
    assert served.client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(served.openai.NotFoundError, match="serves only 'embedded'"):
        served.client.models.retrieve("other")
    assert "ChatRequest" in served.http.get("/openapi.json").json()["components"]["schemas"]
    assert served.http.get("/health").json() == {"status": "ok"}


def test_local_only(served: Any) -> None:
    assert served.host in ("127.0.0.1", "::1")


# ---- answers ----------------------------------------------------------------------------------------------------


def test_streams_at_once(served: Any) -> None:
    """Every answer, streamed or not, is the lone one."""

    async def ask(client: Any, number: int) -> str:
        wanted = {"model": "embedded", "prompt": prompt(number), "max_tokens": 8 + number}
        if number % 2:
            return str((await client.completions.create(**wanted)).choices[0].text)
        parts = await client.completions.create(**wanted, stream=True)
        return "".join([part.choices[0].text or "" async for part in parts])

    async def ask_all() -> list[str]:
        async with served.openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(5)))

    assert asyncio.run(ask_all()) == [expected(prompt(number), 8 + number) for number in range(5)]
    after = wait_until_free(served)
    assert after["tokens_evicted_total"] > 0
    assert after["admitted_requests_total"] >= 5
    assert (after["pages"], after["page_tokens"]) == (10, 16)
    assert after["time_to_first_token_seconds_count"] >= 5
    assert after["time_per_output_token_seconds_count"] >= 5 * 7
    assert after['answers_total{end="length"}'] >= 5


def test_chat(served: Any) -> None:
    whole = served.client.chat.completions.create(**CHAT, max_tokens=12)
    parts = list(
        served.client.chat.completions.create(
            **CHAT, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    content = whole.choices[0].message.content
    assert content
    assert whole.choices[0].finish_reason == parts[-2].choices[0].finish_reason
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage == whole.usage
    _, tokenizer = embedded()
    read = tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole.usage.prompt_tokens == len(read)
    spread = [{"role": "user", "content": [{"type": "text", "text": text} for text in (PLACES, "Where is the key?")]}]
    again = served.client.chat.completions.create(model="embedded", messages=spread, max_tokens=12)
    assert again.choices[0].message.content == content


def test_stop(served: Any) -> None:
    """The text ends before the first of them, and no piece of a stream holds a part of it."""
    text = expected(prompt(1), 40)
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    arguments = TEXT | {"max_tokens": 40, "stop": [stop, "no such text"]}
    whole = served.client.completions.create(**arguments)
    parts = list(served.client.completions.create(**arguments, stream=True))
    assert whole.choices[0].text == text[: text.index(stop)] == "".join(part.choices[0].text for part in parts)
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens < 40
    wait_until_free(served)


def test_seed(served: Any) -> None:
    def ask(**options: Any) -> list[str]:
        answer = served.client.completions.create(**(TEXT | {"temperature": 1.5, "max_tokens": 8} | options))
        return [choice.text for choice in answer.choices]

    first = ask(seed=1, n=3)
    assert first == ask(seed=1, n=3)
    assert len(set(first)) > 1
    assert first[0] == ask(seed=1)[0]
    likely = [ask(seed=1, temperature=0), ask(top_p=1e-6), *(ask(extra_body={name: 1}) for name in ("top_k", "min_p"))]
    assert likely == [[expected(prompt(1), 8)]] * 4
    assert len({*ask(n=3), *ask(n=3)}) > 1


def test_logprobs(served: Any) -> None:
    """Those of the model, whatever temperature and bias make of them."""
    model, tokenizer = embedded.__wrapped__()  # the one that is served reads pages
    ids = tokenizer("The key is under")["input_ids"]
    answer = served.client.completions.create(
        model="embedded", prompt=ids, max_tokens=4, logprobs=3, temperature=0.7, seed=5
    )
    reported = answer.choices[0].logprobs
    new = tokenizer("The key is under" + answer.choices[0].text)["input_ids"][len(ids) :]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    assert [tokenizer.decode([token]) for token in new] == reported.tokens
    assert reported.token_logprobs == pytest.approx(
        logprobs.gather(1, torch.tensor(new)[:, None])[:, 0].tolist(), abs=1e-4
    )
    for top, row in zip(reported.top_logprobs, logprobs, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert reported.text_offset == [sum(map(len, reported.tokens[:at])) for at in range(4)]
    chat = served.client.chat.completions.create(**CHAT, max_tokens=5, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).strip() == chat.choices[0].message.content.strip()
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)  # greedy
    parts = served.client.chat.completions.create(**CHAT, max_tokens=5, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_where_answers_end(served: Any) -> None:
    """Before tokens that are named, and not where the model ends them."""
    _, tokenizer = embedded()
    (end,) = tokenizer.convert_tokens_to_ids(["<eos>"])
    text = expected(prompt(1), 12)
    last = tokenizer(text, add_special_tokens=False)["input_ids"][5]
    got = served.client.completions.create(**TEXT, extra_body={"stop_token_ids": [last]}).choices[0]
    assert text.startswith(got.text) and tokenizer.decode([last]) not in got.text
    assert got.finish_reason == "stop"
    arguments = TEXT | {"logit_bias": {str(end): 100}, "max_tokens": 5}
    for ignored, tokens, reason in ((False, 1, "stop"), (True, 5, "length")):
        got = served.client.completions.create(**arguments, extra_body={"ignore_eos": ignored})
        assert (got.choices[0].finish_reason, got.choices[0].text) == (reason, "")
        assert got.usage.completion_tokens == tokens


def test_usage_of_each_piece(served: Any) -> None:
    how = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = served.client.completions.create(**TEXT, stream=True, stream_options=how)
    counted = [part.usage.completion_tokens for part in parts]
    assert counted == sorted(counted) and counted[-1] == last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == parts[0].usage.prompt_tokens


TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
CALLED = [
    {"role": "user", "content": "Where is the key?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "well"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "name": "look", "content": "a key"},
]
TELLING = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% if loud %}LOUD{% endif %}"
    "{% for m in messages %}<{{ m.role }} {{ m.name }} {{ m.tool_call_id }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.at }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template decides what the model sees of tools, calls and names; what it does not show is refused."""
    create, seen = served.client.chat.completions.create, []
    prompts = served.server.config.app.state.served.prompts
    for change, param in (
        ({"messages": CHAT["messages"], "tools": TOOLS}, "tools"),
        ({"messages": CALLED[:2]}, "messages"),
        ({"messages": [*CHAT["messages"], {"role": "user", "name": "Ann", "content": "Hello"}]}, "messages"),
    ):
        with pytest.raises(served.openai.BadRequestError, match="ignores") as refused:
            create(model="embedded", **change)
        assert refused.value.param == param
    text = prompts._text
    monkeypatch.setattr(prompts, "_text", lambda special, messages: (seen.append(messages), text(special, messages))[1])
    for tokenizer in (prompts._encoder, prompts._tokenizer):
        monkeypatch.setattr(tokenizer, "chat_template", TELLING)
    arguments: dict[str, Any] = {"model": "embedded", "messages": CALLED, "max_tokens": 2, "tools": TOOLS}
    for more in ({}, {"tool_choice": "auto", "parallel_tool_calls": True}, {"tool_choice": "none"}):
        assert create(**arguments, **more).choices[0].finish_reason == "length"
    create(**arguments, extra_body={"chat_template_kwargs": {"loud": True}})
    talk = "<user  >Where is the key?<assistant  >look(well)<tool look 1>a key<assistant>"
    assert [prompt_text.rpartition("</tools>")[2] for prompt_text in seen[:4]] == [talk, talk, talk, f"LOUD{talk}"]
    assert [
        json.loads(prompt_text[7:].partition("</tools>")[0]) if "<tools>" in prompt_text else None
        for prompt_text in seen[:4]
    ] == [TOOLS, TOOLS, None, TOOLS]
    with pytest.raises(served.openai.BadRequestError, match=r"\d+ .*protect"):
        create(**arguments, extra_body={"protect": ["tools"]})
    with pytest.raises(served.openai.BadRequestError, match="valid dictionary") as refused:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "[1]"}}
        create(**arguments | {"messages": [CALLED[0], CALLED[1] | {"tool_calls": [call]}]})
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_budget_of_a_request(served: Any) -> None:
    """As alone with as many tokens, and in as many pages; more than there is is refused."""
    model, tokenizer = embedded.__wrapped__()
    ids, answers = tokenizer(prompt(1))["input_ids"], []
    for budget in (16, 24, 32, None):
        body = TEXT | {"max_tokens": 8, "extra_body": {"kv_budget": budget}}
        got = served.client.completions.create(**body).choices[0]
        wanted = driving.alone(model, ids, 8, prefill_chunk_size=CHUNK, **OPTIONS | {"budget": budget or 32})
        assert got.text == tokenizer.decode(wanted, skip_special_tokens=True)
        answers.append(got.text)
    assert answers[0] != answers[2] == answers[3]
    for refused_budget, message in (
        (36, "36 is more than 32.*at most 32"),
        (30, "nearest legal: 28 or 32"),
        (8, "legal.*12"),
    ):
        with pytest.raises(served.openai.BadRequestError, match=message) as refused:
            served.client.completions.create(**TEXT, extra_body={"kv_budget": refused_budget})
        assert refused.value.param == "kv_budget"
    chat = served.client.chat.completions.create(**CHAT, max_tokens=3, extra_body={"kv_budget": 16})
    assert chat.choices[0].finish_reason == "length"


def test_several_prompts(served: Any) -> None:
    prompts = [prompt(0), prompt(1)]
    answer = served.client.completions.create(model="embedded", prompt=prompts, max_tokens=6, n=2)
    wanted = [expected(text, 6) for text in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(4))
    assert answer.usage.completion_tokens == 24


# ---- what is refused --------------------------------------------------------------------------------------------

LONG = PLACES * 40
USER = {"role": "user", "content": "x"}
BAD_MESSAGES: list[Any] = [
    *([], None, "hello", [[]], [{"content": "x"}], [{"role": "user"}], [USER] * (LONGEST + 1)),
    *([USER | {"content": content}] for content in (None, 5, "\ud800", LONG)),
    [USER | {"role": "robot"}],
    [USER, {"role": "tools", "content": "x", "tool_call_id": "1"}],
    [USER | {"tool_call_id": "1"}],
    [USER | {"tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
    [USER | {"content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [USER | {"\ud800": 1}],
    [USER | {"name": "Ann"}],
]
BAD_CHATS: list[Any] = [
    {},
    *({"messages": messages} for messages in BAD_MESSAGES),
    *(CHAT | {"model": model} for model in ("no/such/model", "\ud800", 3)),
    *(CHAT | {"tools": tools} for tools in ([{"type": "function"}], "bad")),
    *(CHAT | {"protect": protect} for protect in ("system", ["tool"], [[0, 4]])),
    *(
        CHAT | {"chat_template_kwargs": {name: value}}
        for name, value in (("enable_thinking", False), ("tokenize", False), ("bos_token", "\ud800"))
    ),
    *(
        CHAT | change
        for change in (
            {"tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
            {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
            {"top_logprobs": 3},
            {"max_tokens": 3, "max_completion_tokens": 4},
            {"logprobs": True, "top_logprobs": 1000},
            {"logprobs": 1},
            {"echo": True},
            {"max_tokens": 0},
            {"max_completion_tokens": 0},
        )
    ),
]
BAD_VALUES: dict[str, list[Any]] = {
    "max_tokens": [math.inf, math.nan, -1, 0, "5", True],
    "temperature": [-1, math.nan, math.inf, "hot"],
    "top_p": [-1, 2],
    "stop_token_ids": [[10**9], [-1], [1] * 100],
    "n": [0, 1000],
    "seed": [2**70, 0.5],
    "stop": ["", ["a"] * 17, {"a": 1}],
    "logit_bias": [{"x": 1}, {"1000000000": 1}, {"1": 1000}, {"9" * 5000: 1}, [1]],
    "kv_budget": [0, 30, 10**30, "16", "25% of memory"],
    **{"top_k": [-2], "repetition_penalty": [1e-39], "min_p": [1.5], "length_penalty": [True], "logprobs": [-1]},
    **{"frequency_penalty": [3], "echo": ["yes"], "best_of": [2], "suffix": ["end"], "stream": ["yes"]},
    **{"stream_options": [{"no_such": 1}], "no_such_field": [1], "generation_config": ["{}"], "num_beams": [4]},
}
BAD_PROMPTS = [None, [], [[]], [1, "a"], [-1], [10**9], [10**30], ["x"] * 65, {"text": "x"}, "\udc00", LONG]
BAD_SPANS: list[Any] = [["system"], [[0, 4, 5]], [[5, 4]], [[0, 400]], [[10**30, 10**30 + 1]]]
BAD_TEXTS: list[Any] = [
    *([], "text", None, 5, {}),
    *({"prompt": bad} for bad in BAD_PROMPTS),
    *({"prompt": "x", "protect": bad} for bad in BAD_SPANS),
    *(TEXT | {name: bad} for name, values in BAD_VALUES.items() for bad in values),
    TEXT | {"kv_budget": 16, "protect": [[0, 12]]},
    TEXT | {"echo": False, "max_tokens": 0},
]
RAW = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"]


def test_bad_inputs(served: Any) -> None:
    """Each is told why, in OpenAI's shape; none is a failure of the server, and the others never notice."""
    bodies = [("/v1/chat/completions", json.dumps(body).encode()) for body in BAD_CHATS]
    bodies += [("/v1/completions", json.dumps(body).encode()) for body in BAD_TEXTS]
    bodies += [(path, raw) for path in ("/v1/chat/completions", "/v1/completions") for raw in RAW]
    assert len(bodies) >= 64
    before = numbers(served)["admitted_requests_total"]
    for path, body in bodies:
        got = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
        wanted = 404 if b'"model": "no/' in body else 400
        assert got.status_code == wanted, (body[:200], got.text)
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}
        assert got.json()["error"]["message"].endswith((".", "?"))
    assert numbers(served)["admitted_requests_total"] == before
    assert wait_until_free(served)['refused_requests_total{status="400"}'] >= 64
    assert served.client.completions.create(**TEXT).choices[0].text == expected(prompt(1), 12)


def test_what_is_refused_names_itself(served: Any) -> None:
    cases = [
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"extra_body": {"no_such": 1}}, "no_such", "unsupported_parameter"),
        ({"extra_body": {"no-such.field": 1}}, "no-such.field", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages", "context_length_exceeded"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_value"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "unsupported_value"),
    ]
    refused_messages: list[tuple[dict[str, Any], str, str]] = [
        ({"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "content[0]", "unsupported_value"),
        ({"content": [{"type": "text", "text": "a", "no_such": 1}]}, "content[0].no_such", ""),
        ({"content": [{"type": "text"}]}, "content[0].text", "invalid_value"),
        ({"content": None}, "content", "invalid_value"),
        ({"content": "a", "role": "robot"}, "role", "invalid_value"),
        ({"content": "a", "tool_call_id": "1"}, "tool_call_id", "invalid_value"),
        ({"content": "a", "refusal": "no"}, "refusal", ""),
    ]
    cases += [
        ({"messages": [{"role": "user"} | message]}, f"messages[0].{param}", code or "unsupported_parameter")
        for message, param, code in refused_messages
    ]
    for change, param, code in cases:
        with pytest.raises(served.openai.BadRequestError) as refused:
            served.client.chat.completions.create(**CHAT | change)
        assert (refused.value.param, refused.value.code) == (param, code)
        assert param.rpartition(".")[2] in refused.value.message or code == "context_length_exceeded"
    for prompt_, param in (([1, "a"], "prompt[1]"), (["a", None], "prompt[1]"), ([[1], "a"], "prompt[1]")):
        got = served.http.post("/v1/completions", json={"prompt": prompt_})
        assert (got.status_code, got.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_what_is_not_said_to_be_json(served: Any, kind: str | None) -> None:
    """As curl and pages in a browser send it."""
    headers = {} if kind is None else {"Content-Type": kind}
    got = served.http.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers)
    assert got.status_code == 415
    assert f"The body has {f'the type {kind}' if kind else 'no type'}: send JSON" in got.json()["error"]["message"]


def test_prompt_cache_key(served: Any) -> None:
    """What others have read is begun with only under the same one."""

    def shared(key: str | None) -> float:
        served.client.completions.create(**TEXT | {"prompt": prompt(8)}, extra_body={"prompt_cache_key": key})
        return numbers(served)["tokens_shared_total"]

    first, again, other, nobody = shared("a"), shared("a"), shared("b"), shared(None)
    assert first < again == other == nobody < shared("b")


def test_max_tokens_is_a_ceiling(served: Any) -> None:
    """More than there is room for is as much as there is room for, and the client is told."""
    for asked in (10**30, 2e9, MOST + 1):
        answer = served.http.post("/v1/completions", json=TEXT | {"max_tokens": asked})
        got = answer.json()
        assert got["choices"][0]["finish_reason"] in ("length", "stop")
        assert got["usage"]["completion_tokens"] <= MOST
        assert f"at most {MOST} tokens" in got["warning"] and got["warning"] in answer.headers["warning"]
    lines = served.http.post("/v1/completions", json=TEXT | {"max_tokens": 2e9, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [f"at most {MOST} tokens" in event.get("warning", "") for event in events] == [False] * (len(events) - 1) + [
        True
    ]
    answer = served.http.post("/v1/completions", json=TEXT | {"max_tokens": 2})
    assert "warning" not in answer.headers and "warning" not in answer.json()


def test_a_template_that_fails_fails_alone(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls for one request fail in test_answers_that_fail.py."""
    tokenizer = served.server.config.app.state.served.prompts
    monkeypatch.setattr(tokenizer._encoder, "chat_template", "{{ messages[0]['content'] / 0 }}")
    with pytest.raises(served.openai.BadRequestError, match="chat template"):
        served.client.chat.completions.create(**CHAT)
    wait_until_free(served)
    assert served.client.completions.create(**TEXT).choices[0].text == expected(prompt(1), 12)


def test_sizes(served: Any) -> None:
    """A body is not read to its end, with its length named or not; a prompt is bounded in tokens."""
    large = json.dumps(TEXT | {"prompt": "x" * (1 << 18)}).encode()
    for content in (large, iter([large[:1000], large[1000:]])):
        got = served.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large")
    for count, status in ((LONGEST, 200), (LONGEST + 1, 400)):
        got = served.http.post("/v1/completions", json=TEXT | {"prompt": [5] * count, "max_tokens": 1})
        assert got.status_code == status
    assert got.json()["error"]["code"] == "context_length_exceeded"


# ---- clients that go away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [3, LONGEST])
def test_a_client_that_goes_away(served: Any, stream: bool, count: int) -> None:
    """While its prompt is read, or while it is answered; streamed or not."""
    before, forwards, standing, gone = numbers(served), itertools.count(), threading.Event(), threading.Event()

    def stand_still() -> None:
        if next(forwards) == 3:
            standing.set()
            gone.wait()

    with steps(stand_still):
        connection = socket.create_connection((served.host, served.port))
        asked = {"prompt": [5] * count, "max_tokens": 1 if count > 3 else MOST, "stream": stream}
        connection.sendall(request(TEXT | asked | {"prompt_cache_key": f"nobody has read this: {count} {stream}"}))
        try:
            wait_for(standing.is_set)
            assert numbers(served)["live_requests"] == 1
            connection.close()
            wait_for(lambda: not manager().cancel_queue.empty())
        finally:
            gone.set()
        after = wait_until_free(served)
    cancelled = 'answers_total{end="cancelled"}'
    assert after[cancelled] == before.get(cancelled, 0) + 1
    assert after["steps_total"] - before["steps_total"] <= 5
    # What came for it after it had gone is not kept.
    served.client.completions.create(**TEXT | {"max_tokens": 1})
    assert manager().output_router.output_queue.empty()
    assert not manager().output_router.result_handlers


def test_half_a_request(served: Any) -> None:
    """A body that never ends holds nothing."""
    connection = socket.create_connection((served.host, served.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert served.client.completions.create(**TEXT).choices[0].text == expected(prompt(1), 12)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "embedded", "--budget", "64", "--compile"], "No such option: --compile"),
        (["--model", "embedded"], "--budget"),
        (["--model", "no/such/model", "--budget", "64"], "cannot load"),
        (["--model", "embedded", "--budget", "63"], "not a multiple"),
        (["--model", "embedded", "--budget", "25% of memory"], "plan` says how many tokens"),
        (["--model", "embedded", "--budget", "64", "--policy", "lazy_eviction"], "lazy_eviction"),
        (["--model", "embedded", "--budget", "64", "--pages", "1", "--page-size", "16"], "num_blocks=1"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weights are read."""
    monkeypatch.setattr("hf_paged_eviction_server.server.load_model", lambda settings: 1 / 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())
    assert "Traceback" not in result.output


def test_help_offers_what_is_there() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help-all"], env={"COLUMNS": "100"}).output
    assert all(option in shown for option in ("--max-prompt-tokens", "--bits"))
    assert not any(option in shown for option in ("--rank", "--positions", "--disposal", "--heads"))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", "--model", "embedded", "--budget", "64"])
    assert result.exit_code == 2
    assert "pip install 'hf_paged_eviction[serve]'" in result.stderr.replace("\n", "")


def test_what_is_not_followed_is_said() -> None:
    from types import SimpleNamespace

    from transformers import GenerationConfig

    from hf_paged_eviction_server.server import _announcement

    pool = SimpleNamespace(num_blocks=4, page_size=16)
    sizes = {"budget": 64, "page_tokens": lambda size, dtype: size}
    options = SimpleNamespace(**sizes, policy=SimpleNamespace(label="keydiff"))
    manager = SimpleNamespace(continuous_batching_config=pool, options=options)
    generation = GenerationConfig(temperature=0.5, do_sample=True, typical_p=0.9)
    model = SimpleNamespace(generation_config=generation, dtype=torch.float32)
    first, second = _announcement(SimpleNamespace(name="m"), manager, model)
    assert "64 tokens per request and layer by keydiff, 4 pages of 16 tokens" in first
    assert second.endswith("not followed: typical_p")


def test_pages_follow_the_budget() -> None:
    from hf_paged_eviction.serving.options import ServingOptions
    from hf_paged_eviction_server.options import ServeOptions
    from hf_paged_eviction_server.server import _pool

    for changes in ({}, {"pages": 8}):
        options = ServeOptions(model="embedded", budget=64, **changes)
        checked = ServingOptions(driving.model_of().config, **options.batching_arguments)
        assert _pool(options, checked, torch.float32).page_size == 64


def test_the_harness_does_not_know_it() -> None:
    """Its command is found by an entry point alone."""
    from importlib.metadata import entry_points
    from pathlib import Path

    import hf_paged_eviction_eval

    (point,) = entry_points(group="hf_paged_eviction_eval.commands", name="serve")
    assert point.value == "hf_paged_eviction_server.command:serve"
    sources = Path(hf_paged_eviction_eval.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "paged_eviction_server" in path.read_text("utf-8")]
