"""One question about one long context."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_QUESTION_TOKENS = 48
"""A question has at most this many tokens of the embedded tokenizer."""


@dataclass(frozen=True)
class Sample:
    """What a task asks: `context` may be compressed before `question` is known.

    Attributes:
        id: unique within the task and length.
        task: name of the task.
        context: the text that may be compressed; the prompt is `context + question`.
        question: the text that follows it.
        answers: acceptable answers; what they mean is the metric's business.
        max_new_tokens: most tokens of an answer.
        metadata: what reports group rows by.
        metric: name of the metric, see `metrics.score_sample`; None: the task scores its own answers.
        all_classes: names of all classes, of classification tasks.
        length: the `length` field of a LongBench record, in words: decides the bucket of LongBench-E.
        chat: wrapped in the chat template, where the tokenizer has one.
        cue: what the answer begins with: the end of a plain prompt; in a chat, behind the mark of the model's turn.
        stop_at_newline: a newline ends the answer, though never before its first token.
        first_line: only the first line of the answer is scored.
        system: the system message of a chat; in plain text it stands before the context.
        protocol_tokens: most tokens of an answer by the protocol of the task, where `max_new_tokens` is another.
    """

    id: str
    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    metadata: dict[str, float | int | str] = field(default_factory=dict)
    metric: str | None = None
    all_classes: tuple[str, ...] | None = None
    length: int | None = None
    chat: bool = False
    cue: str = ""
    stop_at_newline: bool = False
    first_line: bool = False
    system: str = ""
    protocol_tokens: int | None = None

    @property
    def prompt(self) -> str:
        """As plain text."""
        return self.opening + self.context + self.question + self.cue

    @property
    def opening(self) -> str:
        """The system message as plain text."""
        return self.system and f"{self.system}\n\n"
