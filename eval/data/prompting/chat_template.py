"""A prompt as a chat of one message, with no system prompt but what the template itself adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import UserError


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer can wrap a prompt."""
    return bool(getattr(tokenizer, "chat_template", None))


def takes_turns(tokenizer: Any) -> bool:
    """Whether the template marks who speaks; one that only joins messages, as the embedded model's, does not.

    Raises:
        UserError: there is a template, and it fails.
    """
    if not has_template(tokenizer):
        return False
    text = render("a", tokenizer)
    for mark in (tokenizer.bos_token, tokenizer.eos_token):
        text = text.replace(mark or "", "")
    return text.strip() != "a"


def wrap(context: str, question: str, tokenizer: Any, cue: str = "") -> tuple[str, str]:
    """The wrapped prompt in two parts: up to the end of the context, and from the question on.

    With a cue the answer has begun with it.

    The template may strip the message or write before it what it likes. Its special tokens are in the text, so the
    parts are to be tokenised without adding any. The first part depends on the context alone.
    """
    whole = render(context + question, tokenizer, cue)
    # Two other messages that go on differently right after the context share with it what stands up to there.
    shared = _shared_length([whole, render(f"{context}A", tokenizer, cue), render(f"{context}B", tokenizer, cue)])
    return whole[:shared], whole[shared:]


def end_of_turn(tokenizer: Any) -> str:
    """What the template writes between a message and its answer: the end of the user's turn, the model's begin."""
    whole = render("A", tokenizer)
    return whole[len(whole) - _shared_length([whole[::-1], render("B", tokenizer)[::-1]]) :]


def render(message: str, tokenizer: Any, cue: str = "") -> str:
    """The text that the model reads when a user says `message`, up to the mark of its own turn and the cue."""
    if not has_template(tokenizer):
        raise UserError(
            "--chat-template always: the tokenizer has no chat template; take `auto`, or the tokenizer of an "
            "instruct model (--tokenizer)"
        )
    chat = [{"role": "user", "content": message}]
    if cue:
        chat.append({"role": "assistant", "content": cue.strip()})
    try:
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not cue, continue_final_message=bool(cue)
        )
    except Exception as error:  # a template is a program, it may fail in any way
        raise UserError(f"the chat template of the tokenizer fails (--chat-template never): {error}") from error
    return text


def _shared_length(texts: Sequence[str]) -> int:
    """Characters that all of these texts begin with."""
    low, high = 0, min(map(len, texts))
    while low < high:
        middle = (low + high + 1) // 2
        if len({text[low:middle] for text in texts}) == 1:
            low = middle
        else:
            high = middle - 1
    return low
