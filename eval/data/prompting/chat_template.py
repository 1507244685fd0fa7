"""A prompt as a chat of one message, with no system message but that of the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import UserError


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer can wrap a prompt."""
    return bool(getattr(tokenizer, "chat_template", None))


def takes_turns(tokenizer: Any) -> bool:
    """Whether the template marks who speaks. That of the embedded model does not: it only joins messages.

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

    The first part depends on the context alone, whatever the template strips or adds. Special tokens are in the text,
    so the parts are tokenised without adding any. If there is a cue, the answer has begun with it.
    """
    whole = render(context + question, tokenizer, cue)
    # Two other messages that go on differently right after the context share with it what stands up to there.
    others = [render(f"{context}{letter}", tokenizer, cue) for letter in "AB"]
    shared = _shared_length([whole, *others])
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
    try:
        text: str = tokenizer.apply_chat_template(messages(message, cue), tokenize=False, **_end(cue))
    except Exception as error:  # a template is a program, it may fail in any way
        raise UserError(f"the chat template of the tokenizer fails (--chat-template never): {error}") from error
    return text


def messages(message: str, cue: str = "") -> list[dict[str, str]]:
    """The chat in which a user says `message`."""
    chat = [{"role": "user", "content": message}]
    return [*chat, {"role": "assistant", "content": cue.strip()}] if cue else chat


def _end(cue: str) -> dict[str, Any]:
    return {"add_generation_prompt": not cue, "continue_final_message": bool(cue)}


def protected_spans(
    context: str, question: str, tokenizer: Any, cue: str, roles: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """The tokens of messages of these roles in a wrapped prompt.

    Raises:
        UserError: the tokenizer does not tell where they are.
    """
    from hf_paged_eviction import spans_of_roles  # brings torch, which a list of tasks does without

    try:
        chat = messages(context + question, cue)
        return tuple(spans_of_roles(tokenizer, chat, roles, **_end(cue)))
    except ValueError as error:
        raise UserError(f"--protect {','.join(roles)}: {error}") from error


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
