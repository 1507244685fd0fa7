"""One question about one long context."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_QUESTION_TOKENS = 48
"""A question has at most this many tokens of the embedded tokenizer."""


@dataclass(frozen=True)
class Sample:
    """What a task asks: `context` may be compressed before `question` is known."""

    id: str
    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    metadata: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return self.context + self.question
