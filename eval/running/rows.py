"""A line of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..data.prompting.prompts import Batch, Prompt
from ..metrics.thinking import without_thinking
from ..options.settings import TaskSettings
from ..store.results import Row
from ..tasks.suites import score
from .variants import Variant


def finished_row(
    settings: TaskSettings,
    batch: Batch,
    variant: Variant,
    prompt: Prompt,
    tokens: int | None,
    text: str,
    answer_tokens: Sequence[int],
    ends: Set[int],
    efficiency: Mapping[str, Any],
    agreement: Mapping[str, float] | None,
    hits: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """The line of one prompt under one variant.

    Args:
        tokens: its budget.
        text: the answer, thinking included.
        answer_tokens: generated, the one that ended it included.
        ends: tokens that end an answer.
        efficiency: what it cost.
        agreement: with the full cache; None where nobody asks.
        hits: see `hits.hit_rates`; None where nobody asks.
    """
    sample = prompt.sample
    # Fed with the full cache's answer, the model says nothing that could end.
    answer, thinking = without_thinking(text, prompt.thinking)
    fed = settings.teacher_forced and not variant.budget.is_full
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
        "thinking": thinking,
        "score": float(score(sample, answer, settings)),
        "metadata": dict(sample.metadata),
        "max_new_tokens": sample.max_new_tokens,
        "protocol_tokens": sample.protocol_tokens,
        "new_tokens": len(answer_tokens),
        "ended": None if fed else bool(answer_tokens) and answer_tokens[-1] in ends,
        "repeated": None if fed else repeated(answer_tokens),
        "efficiency": dict(efficiency),
        "agreement": None if agreement is None else dict(agreement),
        "hit_rate": None if hits is None else dict(hits),
    }


def repeated(tokens: Sequence[int], run: int = 4) -> float:
    """Of all runs of so many tokens, the share that stood there before; 0 for an answer that has none."""
    runs = [tuple(tokens[at : at + run]) for at in range(len(tokens) - run + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
