"""Spans of messages by role, in the chat templates that are in use."""

import time
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_paged_eviction import spans_of_roles

CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be short. "},
    {"role": "user", "content": "Be short, too"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "ok"},
]


def letters(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A token per character."""
    alphabet = {chr(code): code - 32 for code in range(32, 127)}
    words = Tokenizer(models.WordLevel(alphabet, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = template
    return tokenizer


def text_of(tokenizer: Any, spans: list[tuple[int, int]], **options: Any) -> list[str]:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
    return [text[start:end] for start, end in spans]


def test_messages_with_the_marks_before_them() -> None:
    tokenizer = letters()
    assert text_of(tokenizer, spans_of_roles(tokenizer, MESSAGES)) == ["<|system|>Be short."]
    spans = spans_of_roles(tokenizer, MESSAGES, ("system", "last_user"))
    assert text_of(tokenizer, spans) == ["<|system|>Be short.", "<end><|user|>ok"]
    spans = spans_of_roles(tokenizer, MESSAGES, ("user",))
    assert text_of(tokenizer, spans) == ["<end><|user|>Be short, too", "<end><|user|>ok"]
    assert spans_of_roles(tokenizer, MESSAGES[1:]) == []


@pytest.mark.parametrize(("role", "hint"), [("sytem", "Did you mean 'system'"), ("xyz", "last_user, tools")])
def test_a_role_that_is_misspelt(role: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{role!r}.*{hint}"):
        spans_of_roles(letters(), MESSAGES, (role,))
    own = [*MESSAGES, {"role": "ipython", "content": "3"}]
    assert len(spans_of_roles(letters(), own, ("ipython", "tool"))) == 1


def test_a_message_that_says_what_its_marks_say() -> None:
    tokenizer = letters()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "user"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = spans_of_roles(tokenizer, messages, ("system", "last_user"))
    assert [text[start:end] for start, end in spans] == ["<|system|>s", "<end><|user|>user"]


def test_a_message_without_words() -> None:
    """Of a call the template may write something else."""
    tokenizer = letters("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<end>{% endfor %}")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|{{", "{{ 'said: ' if m['content'] else '' }}<|{{")
    messages = [*MESSAGES[1:2], {"role": "assistant", "content": None}, {"role": "user", "content": "go on"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ((start, end),) = spans_of_roles(tokenizer, messages, ("last_user",))
    assert text[start:end] == "<end><|assistant|><end>said: <|user|>go on"


def test_tools() -> None:
    tokenizer, tools = letters(), [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    (span,) = spans_of_roles(tokenizer, MESSAGES, ("tools",), tools=tools)
    (text,) = text_of(tokenizer, [span], tools=tools)
    assert '"add"' in text and "system" not in text
    assert spans_of_roles(tokenizer, MESSAGES, ("tools",)) == []
    assert [span] == spans_of_roles(tokenizer, MESSAGES, ("tools",), tools=tools, add_generation_prompt=False)
    both = spans_of_roles(tokenizer, MESSAGES, ("tools", "system", "last_user"), tools=tools)
    assert span in both and len(both) == 3


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"protect=\[\(start"):
        spans_of_roles(letters(None), MESSAGES)
    with pytest.raises(ValueError, match=r"show.*0"):
        spans_of_roles(letters("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"), MESSAGES)
    with pytest.raises(TypeError, match="'system'"):
        spans_of_roles(letters(), MESSAGES, "system")


def test_many_messages() -> None:
    """Time grows with the text, not with its square: this took minutes."""
    many = [{"role": "user", "content": str(number)} for number in range(20_000)]
    began = time.process_time()
    spans = spans_of_roles(letters(), many, ["user"])
    assert time.process_time() - began < 20
    assert len(spans) == len(many)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
