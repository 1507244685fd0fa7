"""Thinking aloud before an answer: it is no part of what is scored."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
#: Whether an answer came to the end of its thinking.
ENDED, UNENDED = "ended", "unended"


def opens_thinking(prompt: str) -> bool:
    """Whether the model's turn begins with thinking that the prompt has opened, as some chat templates do."""
    return prompt.rstrip().endswith(OPEN)


def without_thinking(answer: str, opened: bool = False) -> tuple[str, str | None]:
    """The answer behind the thinking, and `ENDED`, `UNENDED` (the answer is empty then) or None for no thinking.

    Args:
        opened: see `opens_thinking`.
    """
    if CLOSE in answer:
        return answer.rpartition(CLOSE)[2].lstrip(), ENDED
    return ("", UNENDED) if opened or answer.lstrip().startswith(OPEN) else (answer, None)
