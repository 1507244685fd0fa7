"""A line of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..data.prompting.prompts import Batch, Prompt
from ..metrics.thinking import without_thinking
from ..options.settings import TaskSettings
from ..store.results import Row
from .variants import Variant


def finished_row(
    settings: TaskSettings,
    batch: Batch,
    variant: Variant,
    prompt: Prompt,
    text: str,
    tokens: Sequence[int],
    ends: Set[int],
    measured: Mapping[str, Any],
) -> Row:
    """The line of one prompt under one variant.

    Args:
        text: the answer, thinking included.
        tokens: of the answer, with the one that ended it.
        ends: tokens that end an answer.
        measured: `budget_tokens`, `efficiency`, and `agreement`, None where nobody asks.
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
        "block_size": variant.block_size(settings),
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
        "score": float(sample.score(answer)),
        "metadata": dict(sample.metadata),
        "max_new_tokens": sample.max_new_tokens,
        "protocol_tokens": sample.protocol_tokens,
        "new_tokens": len(tokens),
        "ended": None if fed else bool(tokens) and tokens[-1] in ends,
        "repeated": None if fed else repeated(tokens),
        **measured,
    }


def repeated(tokens: Sequence[int], run: int = 4) -> float:
    """Of all runs of so many tokens, the share that stood there before; 0 for an answer that has none."""
    runs = [tuple(tokens[at : at + run]) for at in range(len(tokens) - run + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
