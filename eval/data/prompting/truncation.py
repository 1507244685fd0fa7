"""Prompts that are too long lose their middle, by the rules of LongBench's own code."""

from __future__ import annotations

from typing import Any

from ...errors import UserError


def cut_middle(
    context: str, question: str, tokenizer: Any, max_length: int, *, at_once: bool = False
) -> tuple[str, str, bool]:
    """`context + question` without its middle, in two parts again, and whether anything was cut.

    The prompt is tokenised with special tokens; of too many, the first and the last `int(max_length / 2)` stay and are
    decoded without special tokens. Tokenising the text again gives nearly as many, not always as many.

    Args:
        context: the part of the prompt that may be compressed before the rest is known.
        question: the rest of it. The second part returned is what is left of it.
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens.
        at_once: the rule of v2: both ends are decoded together, and an odd token goes to the second.
    """
    if max_length < 2:
        raise UserError(f"a prompt of {max_length} tokens has no middle to cut: use a larger --max-length")
    ids = tokenizer(context + question, verbose=False)["input_ids"]
    if len(ids) <= max_length:
        return context, question, False
    half = max_length // 2
    start = _decode(tokenizer, ids[:half])
    if at_once:
        whole = _decode(tokenizer, ids[:half] + ids[half - max_length :])
        start, end = whole[: len(start)], whole[len(start) :]
    else:
        end = _decode(tokenizer, ids[-half:])
    at = _find_tail(end, question, tokenizer)
    return start + end[:at], end[at:], True


def _find_tail(text: str, tail: str, tokenizer: Any) -> int:
    """Where `tail` begins in `text`, which ends with it or with a part of it, as far as its tokens decode to it."""
    if text.endswith(tail):
        return len(text) - len(tail)
    # Decoding may move blanks and lose special tokens: count the letters that are left of the tail.
    decoded = _decode(tokenizer, tokenizer(tail, add_special_tokens=False, verbose=False)["input_ids"])
    letters = len("".join(decoded.split()))
    at = len(text)
    while at and letters:
        at -= 1
        letters -= not text[at].isspace()
    # The blanks before it are its own, as far as it has any.
    blanks = len(tail) - len(tail.lstrip())
    while at and blanks and text[at - 1].isspace():
        at, blanks = at - 1, blanks - 1
    return at


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
