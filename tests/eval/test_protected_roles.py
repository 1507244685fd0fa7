"""`--protect system`: the spans of the system message reach the caches of a run; the tasks that need them."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged_eviction_eval.data.prompting.prompts import encode
from hf_paged_eviction_eval.tasks import get_task, make_samples
from hf_paged_eviction_eval.tasks.instructions import RULES

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
    found = prompt(tokenizer, task, aware)
    assert found.tokens + found.sample.max_new_tokens <= 400
    ((start, end),) = found.protected
    text = tokenizer.decode(found.context[start:end])
    assert start == 0 and "".join(found.sample.system.split())[-20:] in "".join(text.split())
    assert "text" not in text
    assert prompt(tokenizer, task, aware, ()).protected == ()


def test_rules_are_checked() -> None:
    task = get_task("instructions")
    good = {
        "start": ("K417 it is", "it is K417"),
        "capitals": ("PARIS.", "Paris."),
        "word": ("A lantern.", "A lamp."),
        "name": ("I, Brisco, say", "I say"),
        "list": ("* a\n* b", "a, b"),
    }
    assert good.keys() == RULES.keys()
    words = {"start": "K417", "word": "lantern", "name": "Brisco"}
    for name, (kept, broken) in good.items():
        assert RULES[name].kept(kept, words.get(name, "")) and not RULES[name].kept(broken, words.get(name, ""))
    (sample,) = make_samples(task, _Letters(), 900, 1)
    assert task.score(sample, "") == 0.0 and len(sample.answers) == 3


class _Letters:
    """A token per character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}
