"""A line of the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..prompting.prompts import Batch, Prompt
from ..prompting.suites import score
from ..settings import TaskSettings
from ..store.results import Row
from .variants import Variant


def finished_row(
    settings: TaskSettings,
    batch: Batch,
    variant: Variant,
    prompt: Prompt,
    tokens: int | None,
    text: str,
    new_tokens: int,
    efficiency: Mapping[str, Any],
    agreement: Mapping[str, float] | None,
) -> Row:
    """The line of one prompt under one variant.

    Args:
        tokens: its budget.
        text: the answer as it is scored.
        new_tokens: tokens generated, the one that ended it included.
        efficiency: what it cost.
        agreement: with the full cache; None where nobody asks.
    """
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
        "prediction": text,
        "answers": list(sample.answers),
        "all_classes": None if sample.all_classes is None else list(sample.all_classes),
        "record_length": sample.length,
        "metric": sample.metric,
        "score": float(score(sample, text, settings)),
        "metadata": dict(sample.metadata),
        "new_tokens": new_tokens,
        "efficiency": dict(efficiency),
        "agreement": None if agreement is None else dict(agreement),
    }
