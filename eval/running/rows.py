"""A line of the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..prompting.prompts import Batch, Prompt
from ..prompting.suites import score
from ..settings import TaskSettings
from ..store.results import Row
from .variants import Variant


@dataclass(frozen=True)
class Answer:
    """What a variant said to a prompt.

    Attributes:
        text: as it is scored.
        new_tokens: tokens generated, the one that ended it included.
        efficiency: what it cost.
        agreement: with the full cache; None where nobody asks.
    """

    text: str
    new_tokens: int
    efficiency: Mapping[str, float | int | bool | None]
    agreement: Mapping[str, float] | None


def finished_row(
    settings: TaskSettings, batch: Batch, variant: Variant, prompt: Prompt, tokens: int | None, answer: Answer
) -> Row:
    """The line of one prompt under one variant, with its budget in `tokens`."""
    sample = prompt.sample
    return {
        "task": batch.task,
        "length": batch.length,
        "policy": variant.policy,
        "budget": variant.budget.label,
        "budget_tokens": tokens,
        "block_size": settings.block_size,
        "question_aware": settings.question_aware,
        "id": sample.id,
        "prompt_tokens": prompt.tokens,
        "truncated": prompt.truncated,
        "chat": prompt.chat,
        "prediction": answer.text,
        "answers": list(sample.answers),
        "all_classes": None if sample.all_classes is None else list(sample.all_classes),
        "record_length": sample.length,
        "metric": sample.metric,
        "score": float(score(sample, answer.text, settings)),
        "metadata": dict(sample.metadata),
        "new_tokens": answer.new_tokens,
        "efficiency": dict(answer.efficiency),
        "agreement": None if answer.agreement is None else dict(answer.agreement),
    }
