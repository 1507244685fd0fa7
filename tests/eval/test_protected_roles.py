"""`--protect system`: the spans of the system message reach the caches of a run; the tasks that need them."""

from typing import Any

import pytest

from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.tasks import make_samples

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompt(tokenizer: Any, task: str, aware: bool, protect: tuple[str, ...] = ("system",)) -> Any:
    (sample,) = make_samples(task, tokenizer, 400, 1, chat=bool(tokenizer.chat_template))
    return encode(sample, tokenizer, question_aware=aware, max_length=None, chat_template="auto", protect=protect)


@pytest.mark.parametrize("task", ["instructions", "system_prompt"])
@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("template", [CHATML, None], ids=["chat", "plain"])
def test_the_system_message_is_the_span(
    tokenizer: Any, monkeypatch: Any, template: Any, aware: bool, task: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    encoded = prompt(tokenizer, task, aware)
    assert encoded.tokens + encoded.sample.max_new_tokens <= 400
    ((start, end),) = encoded.protected
    text = tokenizer.decode(encoded.context[start:end])
    assert start == 0 and "".join(encoded.sample.system.split())[-20:] in "".join(text.split())
    assert "text" not in text
    assert prompt(tokenizer, task, aware, ()).protected == ()


@pytest.mark.parametrize("task", ["instructions", "system_prompt"])
@pytest.mark.parametrize("template", [CHATML, None], ids=["chat", "plain"])
def test_the_text_fills_the_length_and_says_nothing_of_the_answer(
    tokenizer: Any, monkeypatch: Any, template: Any, task: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for sample in make_samples(task, tokenizer, 400, 6, chat=bool(template)):
        encoded = encode(sample, tokenizer, question_aware=True, max_length=None, chat_template="auto")
        assert 0.9 * 400 <= encoded.tokens + sample.max_new_tokens <= 400
        text = sample.context + sample.question + sample.cue
        assert all(answer in sample.system and answer not in text for answer in sample.answers)


def test_the_share_of_what_was_to_be_said_is_the_score() -> None:
    (sample,) = make_samples("instructions", _Letters(), 900, 1)
    first, second, third = sample.answers
    assert sample.score("") == 0.0
    assert sample.score(f"{first.upper()}, then {third}") == pytest.approx(2 / 3)
    assert sample.score(f"{third} {second} {first}") == 1.0
    (sample,) = make_samples("system_prompt", _Letters(), 900, 1)
    assert sample.score(f"It is {sample.answers[0]}.") == 1.0


class _Letters:
    """A token per character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}
