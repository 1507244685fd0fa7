"""`--protect user`: the spans of messages reach the caches of a run."""

from typing import Any

import pytest

from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.tasks import make_samples

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompt(tokenizer: Any, aware: bool, protect: tuple[str, ...]) -> Any:
    (sample,) = make_samples("passkey", tokenizer, 400, 1, chat=bool(tokenizer.chat_template))
    return encode(sample, tokenizer, question_aware=aware, max_length=None, chat_template="auto", protect=protect)


@pytest.mark.parametrize("aware", [True, False])
def test_the_message_of_the_user_is_the_span(tokenizer: Any, monkeypatch: Any, aware: bool) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    encoded = prompt(tokenizer, aware, ("user",))
    assert encoded.tokens + encoded.sample.max_new_tokens <= 400
    ((start, end),) = encoded.protected
    text = tokenizer.decode((*encoded.context, *encoded.question)[start:end])
    assert "".join(encoded.sample.context.split())[:40] in "".join(text.split())
    assert prompt(tokenizer, aware, ()).protected == prompt(tokenizer, aware, ("system",)).protected == ()


def test_plain_text_has_no_messages(tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert prompt(tokenizer, True, ("user", "system")).protected == ()
