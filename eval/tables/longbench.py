"""The official scores of LongBench out of scores of single answers, in percent and rounded as the official code rounds.

What has no number is None, which JSON writes as `null`; NaN never appears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ..data.longbench.tasks import CATEGORIES, PRESETS, TASKS

#: LongBench-E reports by the `length` field of the record (words, not tokens).
BUCKETS = ("0-4k", "4-8k", "8k+")
#: LongBench v2 reports by the difficulty and by the length of the question, as its records name them.
V2_GROUPS = ("overall", "easy", "hard", "short", "medium", "long")


def task_score(scores: Sequence[float]) -> float | None:
    """Score of a task in percent, two digits: `round(100 * sum / n, 2)`; None without an answer.

    Args:
        scores: one per answer, 0 to 1.
    """
    return score_in_percent(scores, 2) if scores else None


def score_in_percent(scores: Sequence[float], digits: int) -> float:
    """The mean of at least one score, as the official code rounds it."""
    total = 0.0
    for score in scores:  # Not `sum`: from Python 3.12 on it adds with compensation, the official loop does not.
        total += score
    return round(100 * total / len(scores), digits)


def bucket(length: int) -> str:
    """The bucket of LongBench-E that a record of this `length` (words) belongs to."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def bucket_scores(answers: Iterable[tuple[int, float]]) -> dict[str, float | None]:
    """Scores of a task of LongBench-E in percent; an empty bucket is None.

    Args:
        answers: (`length` of the record, score 0 to 1) of each answer.
    """
    bucketed: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for length, score in answers:
        bucketed[bucket(length)].append(score)
    # numpy, as the official code: it adds in pairs, which at a tie of the second digit may round the other way.
    return {name: round(100 * float(np.mean(scores)), 2) if scores else None for name, scores in bucketed.items()}


def v2_scores(answers: Iterable[tuple[str, str, float]]) -> dict[str, float | None]:
    """Accuracies of LongBench v2 in percent, one digit; a group without an answer is None.

    Args:
        answers: (difficulty, length, score 0 or 1) of each answer; difficulty is easy or hard, length is short,
            medium or long.
    """
    grouped_scores: dict[str, list[float]] = {name: [] for name in V2_GROUPS}
    for difficulty, length, score in answers:
        for name in ("overall", difficulty, length):
            grouped_scores.setdefault(name, []).append(score)
    return {name: score_in_percent(scores, 1) if scores else None for name, scores in grouped_scores.items()}


@dataclass(frozen=True)
class Aggregate:
    """One number for several tasks.

    Attributes:
        name: what papers would have to call it.
        value: in percent, two digits; None as long as a task is missing.
        missing: tasks without a score.
        weights: of the tasks in it.
    """

    name: str
    value: float | None
    missing: tuple[str, ...]
    weights: dict[str, float]


def aggregates(scores: Mapping[str, float | None]) -> list[Aggregate]:
    """The aggregates of LongBench v1.

    "Macro" is the official readme's average: the mean of the means of the six categories. "Plain" is what papers on
    the compression of caches report: the mean of the 16 English and code tasks. Both start from the rounded scores
    of the tasks, as published.

    Args:
        scores: `task_score` by name of the task; other tasks than those of LongBench v1 are passed over.
    """
    macro = "LongBench, macro mean of the 6 categories,"
    return [
        _aggregate(f"{macro} 21 tasks", PRESETS["all21"], scores, by_category=True),
        _aggregate(f"{macro} 16 English and code tasks", PRESETS["en16"], scores, by_category=True),
        _aggregate(
            "LongBench, plain mean of the 16 English and code tasks", PRESETS["en16"], scores, by_category=False
        ),
    ]


def _aggregate(name: str, tasks: Sequence[str], scores: Mapping[str, float | None], *, by_category: bool) -> Aggregate:
    groups = [[task for task in tasks if TASKS[task].category == category] for category in CATEGORIES]
    groups = groups if by_category else [list(tasks)]
    weights = {task: 1 / len(groups) / len(group) for group in groups for task in group}
    present = {task: score for task in tasks if (score := scores.get(task)) is not None}
    missing = tuple(task for task in tasks if task not in present)
    value = None if missing else round(fmean(fmean(present[task] for task in group) for group in groups), 2)
    return Aggregate(name, value, missing, weights)
