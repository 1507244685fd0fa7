"""Samples as batches of token ids, and where the compressed part of a prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UserError
from .settings import TaskSettings
from .tasks import Sample, make_samples

#: Tokens at the end of every prompt that are fed after compression; no shorter than a question.
WINDOW = 64


@dataclass(frozen=True)
class Batch:
    """Samples that run together.

    Attributes:
        task: name of the task.
        length: tokens asked for per prompt; shares of it are budgets.
        window: tokens of each prompt that the model reads after the first part was compressed.
        samples: the questions.
        prompts: their token ids, one list per sample.
    """

    task: str
    length: int
    window: int
    samples: tuple[Sample, ...]
    prompts: tuple[tuple[int, ...], ...]


def make_batches(settings: TaskSettings, tokenizer: Any) -> list[Batch]:
    """All batches of a run, in a fixed order."""
    return [
        batch
        for length in settings.lengths
        for task in settings.tasks
        for batch in _task_batches(settings, tokenizer, task, length)
    ]


def _task_batches(settings: TaskSettings, tokenizer: Any, task: str, length: int) -> list[Batch]:
    try:
        samples = make_samples(task, tokenizer, length, settings.samples, settings.seed)
    except ValueError as error:
        raise UserError(f"{error} (--length)") from error
    prompts = [tuple(tokenizer(sample.prompt)["input_ids"]) for sample in samples]
    window = 1 if settings.question_aware else question_window(tokenizer, samples)
    if min(map(len, prompts)) <= window:
        raise UserError(f"{task}: prompts of {length} tokens are too short, ask for a greater --length")
    size = settings.batch_size
    return [
        Batch(task, length, window, tuple(samples[at : at + size]), tuple(prompts[at : at + size]))
        for at in range(0, len(samples), size)
    ]


def question_window(tokenizer: Any, samples: Sequence[Sample]) -> int:
    """Tokens kept out of compression, the same for all samples: the longest question fits."""
    questions = [len(tokenizer(sample.question, add_special_tokens=False)["input_ids"]) for sample in samples]
    return max(WINDOW, *questions)
