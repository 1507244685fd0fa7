"""One question about one long context: the record that every suite is turned into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..metrics import first_line_of, score_sample
from ..metrics.library import is_library_metric, library_score


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
        metric: name of the metric, see `metrics.score_sample`.
        all_classes: names of all classes, of classification tasks.
        length: the `length` field of a LongBench record, in words: decides the bucket of LongBench-E.
        chat: wrapped in the chat template, where the tokenizer has one.
        cue: what the answer begins with: the end of a plain prompt; in a chat, behind the mark of the model's turn.
        stop_at_newline: a newline ends the answer, though never before its first token.
        first_line: only the first line of the answer is scored.
        protocol_tokens: most tokens of an answer by the protocol of the task, where `max_new_tokens` is another.
    """

    id: str
    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    metadata: dict[str, float | int | str] = field(default_factory=dict)
    metric: str = "qa_f1"
    all_classes: tuple[str, ...] | None = None
    length: int | None = None
    chat: bool = False
    cue: str = ""
    stop_at_newline: bool = False
    first_line: bool = False
    protocol_tokens: int | None = None

    @property
    def prompt(self) -> str:
        """As plain text."""
        return self.context + self.question + self.cue

    def with_answers_of(self, tokens: int | None) -> Sample:
        """The same with answers of so many tokens, None for its own; it notes where this leaves its protocol."""
        if tokens in (None, self.max_new_tokens):
            return self
        return replace(self, max_new_tokens=tokens, protocol_tokens=self.max_new_tokens)

    def score(self, prediction: str) -> float:
        """How right a prediction is, from 0 to 1."""
        scored = first_line_of(prediction) if self.first_line else prediction
        if is_library_metric(self.metric):
            return library_score(self.metric, scored, self.answers)
        return score_sample(self.metric, scored, self.answers, self.all_classes)
