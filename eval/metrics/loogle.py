"""Metrics of LooGLE (Li et al. 2023, arXiv 2311.04939) that need no model, as its `automatic_metrics.py` gives them.

Differences: a prediction on which the official script stops with an exception (nothing but full stops; a mask whose
value is no text) scores 0 here, and a prediction is read as a Python literal; the official script runs it as code.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

from .rouge import rouge_l_recall


def rouge_l_recall_or_none(prediction: str, answers: Sequence[str]) -> float:
    """Recall of ROUGE-L by the package `rouge`, the best over the answers. No answer counts as the word None."""
    return max(rouge_l_recall(prediction or "None", answer) for answer in answers)


def cloze_exact(prediction: str, answers: Sequence[str]) -> float:
    """The share of masks that were named as in the answer.

    Args:
        prediction: a dictionary of masks as Python or JSON writes it, and nothing else.
        answers: one, the right dictionary as JSON.
    """
    return _share(prediction, answers, lambda said, right: bool(said == right))


def cloze_partial(prediction: str, answers: Sequence[str]) -> float:
    """The share of masks whose name has a word in common with the right one; arguments as of `cloze_exact`."""
    return _share(
        prediction,
        answers,
        lambda said, right: isinstance(said, str) and not set(said.split()).isdisjoint(right.split()),
    )


def _share(prediction: str, answers: Sequence[str], alike: Callable[[Any, str], bool]) -> float:
    right: dict[str, str] = json.loads(answers[0])
    try:
        said = ast.literal_eval(prediction)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return 0.0
    if not isinstance(said, dict):
        return 0.0
    return sum(mask in said and alike(said[mask], name) for mask, name in right.items()) / len(right)
