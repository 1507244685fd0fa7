"""Find the tokens of chat messages, to protect them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Message = Mapping[str, Any]

#: The user's last message; other roles are those of the messages.
LAST_USER = "last_user"
#: Roles that a conversation may do without.
_COMMON = ("system", "developer", "user", "assistant", "tool")
#: Placeholder of a message, which occurs in no text.
_BLANK = "\ue0f0\ue0f1"
#: The role of the template's text about tools.
TOOLS = "tools"


def spans_of_roles(
    tokenizer: Any,
    messages: Sequence[Message],
    roles: Sequence[str] = ("system",),
    *,
    tools: Sequence[Any] | None = None,
    **template: Any,
) -> list[tuple[int, int]]:
    """Find the spans of messages, for `PagedEvictionCache(protect=...)` and `cache.protect(...)`.

    >>> cache.protect(spans_of_roles(tokenizer, messages, ("system", "last_user")))  # doctest: +SKIP

    The span of a message begins where the previous message ends, so the markers of its turn are protected, too.
    Positions count the tokens of `tokenizer.apply_chat_template(messages, tokenize=True)`. For a padded batch call it
    once per row.

    Args:
        tokenizer: a fast tokenizer with a chat template. (Slow ones do not report the offsets of their tokens.)
        messages: dictionaries with `role` and `content`.
        roles: roles to find, such as "system"; "last_user" = the user's last message, "tools" = what the template
            writes for `tools`.
        tools, template: arguments of `apply_chat_template`.

    Returns:
        Pairs `(start, end)` in order; none for a role that no message has.

    Raises:
        TypeError: `roles` is a string.
        ValueError: a role is none of the usual ones and no message has it, the tokenizer does not report offsets, or
            the template changes the text of a message.
    """
    if isinstance(roles, str):
        raise TypeError(f"roles must be a list such as ['system'], got {roles!r}.")
    known = dict.fromkeys((*(message["role"] for message in messages), *_COMMON, LAST_USER, TOOLS))
    if unknown := [role for role in roles if role not in known]:
        close = get_close_matches(str(unknown[0]), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Use some of: {', '.join(known)}."
        raise ValueError(f"No message has the role {unknown[0]!r}. {hint}")
    if not getattr(tokenizer, "chat_template", None) or not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "This tokenizer has no chat template, or does not report the offsets of its tokens: give spans of "
            "tokens, protect=[(start, end)]."
        )
    text = _render(tokenizer, messages, tools, template)
    spans = [
        places
        for name in roles
        if name == TOOLS and tools
        for places in _of_tools(_render(tokenizer, messages, None, template), text)
    ]
    marks = _marks(tokenizer, messages, tools, template)
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    begin = 0
    for at, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        start = begin + len(marks[at]) if marks and content else begin
        if not text.startswith(content, start):
            start = text.find(content, begin)
        meant = message["role"] in roles or (at == last and LAST_USER in roles)
        if start < 0 and meant:
            raise ValueError(
                f"The chat template does not show message {at} (role {message['role']!r}) unchanged, so its tokens "
                "are not known: give spans of tokens, protect=[(start, end)]."
            )
        if meant:
            spans.append((begin, start + len(content)))
        begin = max(start + len(content), begin)
    return _tokens(tokenizer, text, spans)


def _render(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, template: Mapping[str, Any]
) -> str:
    settings = {"add_generation_prompt": True, **template}
    text: str = tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **settings)
    return text


def _marks(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, template: Mapping[str, Any]
) -> list[str]:
    """The text that the template writes before each message (and behind the last); [] if it cannot be found."""
    blank = [{**message, "content": _BLANK} for message in messages]
    pieces = _render(tokenizer, blank, tools, template).split(_BLANK)
    return pieces if len(pieces) == len(messages) + 1 else []


def _of_tools(without: str, text: str) -> list[tuple[int, int]]:
    """What the template writes with tools and does not write without."""
    most = min(len(text), len(without))
    start = next((at for at in range(most) if text[at] != without[at]), most)
    end = next((at for at in range(most - start) if text[-1 - at] != without[-1 - at]), most - start)
    return [(start, len(text) - end)] if start < len(text) - end else []


def _tokens(tokenizer: Any, text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    shown = [at for at, (first, behind) in enumerate(offsets) if first < behind]
    begins, ends = [offsets[at][0] for at in shown], [offsets[at][1] for at in shown]
    spans = []
    for start, end in sorted(places):
        first, behind = bisect_right(ends, start), bisect_left(begins, end)
        if first < behind:
            spans.append((shown[first], shown[behind - 1] + 1))
    return spans
