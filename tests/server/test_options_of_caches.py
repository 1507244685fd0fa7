"""Servers with options of the cache, one after the other: protected messages, saved contexts, few bits."""

import re
from pathlib import Path
from typing import Any

import pytest
import talking
import torch

import driving
from driving import alone
from hf_paged_eviction import PagedEvictionCache, spans_of_roles
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 48, "block_size": 4, "policy": "keydiff"}


def test_messages_that_are_protected() -> None:
    """What the server protects of every conversation; a request decides for itself; neighbours are what they were."""
    model, tokenizer = talking.embedded()
    messages = [
        {"role": "system", "content": "The key is under the mat."},
        {"role": "user", "content": talking.prompt(2)},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    options = OPTIONS | {"prefill_chunk_size": talking.CHUNK}

    def expected(roles: list[str]) -> str:
        spans = spans_of_roles(tokenizer, messages, roles)
        return str(tokenizer.decode(alone(model, ids, 10, protect=spans, **options), skip_special_tokens=True))

    with talking.serving(**OPTIONS, pages=16, protect="system") as served:
        arguments: dict[str, Any] = {"model": "embedded", "messages": messages, "max_tokens": 10}
        chat = served.client.chat.completions.create
        answers = [
            chat(**arguments, extra_body={} if roles is None else {"protect": roles}).choices[0].message.content
            for roles in (None, ["system"], [])
        ]
        assert answers == [expected(["system"]), expected(["system"]), expected([])]
        assert answers[0] != answers[2]
        spans = spans_of_roles(tokenizer, messages, ["system"])
        text = {"model": "embedded", "prompt": ids, "max_tokens": 10}
        assert served.client.completions.create(**text, extra_body={"protect": spans}).choices[0].text == answers[0]
        assert served.client.completions.create(**text).choices[0].text == answers[2]
        with pytest.raises(served.openai.BadRequestError, match="budget=48") as refused:
            chat(**arguments, extra_body={"protect": ["last_user"]})
        assert refused.value.body["param"] == "protect"  # type: ignore[index]
        talking.wait_until_free(served)


def test_a_saved_context(tmp_path: Path) -> None:
    """A file that a request names; others begin with what was read before."""
    model, tokenizer = talking.embedded()
    text = tokenizer(talking.PLACES * 3)["input_ids"]
    options: dict[str, Any] = {"budget": 64, "block_size": 4, "policy": "keydiff", "sink_tokens": 32}
    cache = PagedEvictionCache(model.config, **options)
    for start in range(0, len(text), 16):
        with torch.no_grad():
            model(torch.tensor([text[start : start + 16]]), **{CACHE_ARGUMENT: cache})
    file = tmp_path / "places.safetensors"
    cache.save(file, model=model)
    question = tokenizer("Where is the key? The key is", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        inputs = cache.follow_up(torch.tensor([question]))
        out = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, generation_config=driving.greedy(8))
    wanted = tokenizer.decode(out[0, -8:], skip_special_tokens=True)
    with talking.serving(**options, pages=16, context=[f"places={file}"]) as served:
        arguments: dict[str, Any] = {"model": "embedded", "prompt": question, "max_tokens": 8}
        for prompt in (question, "Where is the key? The key is"):
            answer = served.client.completions.create(
                **arguments | {"prompt": prompt}, extra_body={"context": "places"}
            )
            assert answer.choices[0].text == wanted
        assert served.client.completions.create(**arguments).choices[0].text != wanted
        with pytest.raises(served.openai.BadRequestError, match="'other'"):
            served.client.completions.create(**arguments, extra_body={"context": "other"})
        with pytest.raises(served.openai.BadRequestError, match=r"48, but the context.* 64 tokens") as refused:
            served.client.completions.create(**arguments, extra_body={"context": "places", "kv_budget": 48})
        assert refused.value.param == "kv_budget"
        before = talking.wait_until_free(served)["tokens_shared_total"]
        long = {"model": "embedded", "prompt": talking.prompt(2), "max_tokens": 6}
        first, second = (served.client.completions.create(**long).choices[0].text for _ in range(2))
        after = talking.wait_until_free(served)
        assert first == second
        assert after["tokens_shared_total"] - before == 112  # 7 cuts
        assert after["kept_bytes"] > 0


def test_few_bits() -> None:
    """As alone with as many bits, in pages that hold more tokens."""
    model, tokenizer = talking.embedded.__wrapped__()
    with talking.serving(bits="4") as server:
        answers = [
            server.client.completions.create(model="embedded", prompt=talking.prompt(at), max_tokens=12)
            for at in range(2)
        ]
        assert float(re.findall(r"page_tokens ([0-9.]+)", server.http.get("/metrics").text)[0]) > 32
    for at, answer in enumerate(answers):
        ids = tokenizer(talking.prompt(at))["input_ids"]
        wanted = alone(model, ids, 12, prefill_chunk_size=talking.CHUNK, **talking.OPTIONS, bits=4)
        assert answer.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
