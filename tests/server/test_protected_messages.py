"""Messages that are never evicted, over HTTP."""

from typing import Any

import pytest
import talking

import driving
from driving import alone
from hf_paged_eviction import spans_of_roles

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 48, "block_size": 4, "policy": "keydiff"}


def test_over_http() -> None:
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
