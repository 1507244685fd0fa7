"""The official scores of LongBench out of scores of single answers, in percent and rounded as the official code rounds.

What has no number is None, which JSON writes as `null`; NaN never appears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot
from statistics import fmean
from typing import NamedTuple

import numpy as np
from pandas import DataFrame, Series, concat

from ..data.longbench.tasks import CATEGORIES, PRESETS, TASKS
from ..data.longbench.v2 import NAME as V2
from .means import Mean, means

E_TASKS = [name for name, task in TASKS.items() if task.is_e]

#: LongBench-E reports by the `length` field of the record (words, not tokens).
BUCKETS = ("0-4k", "4-8k", "8k+")
#: LongBench v2 reports by the difficulty and by the length of the question, as its records name them.
V2_GROUPS = ("overall", "easy", "hard", "short", "medium", "long")


def task_score(scores: Sequence[float]) -> float | None:
    """Score of a task in percent, two digits: `round(100 * sum / n, 2)`; None without an answer.

    Args:
        scores: one per answer, 0 to 1.
    """
    return _rounded(scores, "") if scores else None


def bucket(length: int) -> str:
    """The bucket of LongBench-E that a record of this `length` (words) belongs to."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def parts(frame: DataFrame) -> DataFrame:
    """Answers by the part of their task that has an official number, in a column `part`: the bucket of the record in
    LongBench-E; every group of LongBench v2 that the question is in; of other tasks none, which is ''.

    Args:
        frame: with columns `task`, `record_length` and `metadata`; answers that lack what decides are left out.
    """
    in_e, in_v2 = frame["task"].isin(E_TASKS), frame["task"] == V2
    v2 = frame[in_v2]
    facts = [facts if isinstance(facts, dict) else {} for facts in v2["metadata"]]
    groups = [[fact.get(name) for fact in facts] for name in ("difficulty", "length")]
    bucketed = frame[in_e].assign(part=frame["record_length"][in_e].map(bucket, na_action="ignore"))
    every = [frame[~in_e & ~in_v2].assign(part=""), bucketed, *(v2.assign(part=part) for part in ("overall", *groups))]
    return concat(every).dropna(subset=["part"])


def official(frame: DataFrame, by: Sequence[str]) -> Series:
    """Scores in percent per group, rounded as the official code of the suite rounds, with their errors.

    Args:
        by: columns that tell groups apart, the index of the result; with `part`, see `parts`, those of a part.
    """
    mean_scores = means(frame, by, "score", 100)
    scores = frame.groupby(list(by), sort=False)["score"].agg(list)
    names = scores.index.get_level_values("part") if "part" in by else [""] * len(scores)
    rounded = [
        replace(mean, value=_rounded(values, name))
        for mean, values, name in zip(mean_scores, scores, names, strict=True)
    ]
    return Series(rounded, mean_scores.index, dtype=object)


def _rounded(scores: Sequence[float], part: str) -> float:
    if part in BUCKETS:  # numpy, as the official code: it adds in pairs, which at a tie may round the other way
        return round(100 * float(np.mean(scores)), 2)
    total = 0.0
    for score in scores:  # Not `sum`: from Python 3.12 on it adds with compensation, the official loop does not.
        total += score
    return round(100 * total / len(scores), 1 if part else 2)


class Aggregate(NamedTuple):
    """One number for several tasks.

    Attributes:
        name: what papers would have to call it.
        mean: in percent, two digits; None as long as a task is missing.
        missing: tasks without a score.
    """

    name: str
    mean: Mean | None
    missing: tuple[str, ...]


def aggregates(scores: Mapping[str, Mean]) -> list[Aggregate]:
    """The aggregates of LongBench v1.

    "Macro" is the official readme's average: the mean of the means of the six categories. "Plain" is what papers on
    the compression of caches report: the mean of the 16 English and code tasks. Both start from the rounded scores
    of the tasks, as published.

    Args:
        scores: rounded, by name of the task; other tasks than those of LongBench v1 are passed over.
    """
    by_category = {
        tasks: [[name for name in PRESETS[tasks] if TASKS[name].category == category] for category in CATEGORIES]
        for tasks in ("all21", "en16")
    }
    macro = "LongBench, macro mean of the 6 categories,"
    return [
        _aggregate(f"{macro} 21 tasks", by_category["all21"], scores),
        _aggregate(f"{macro} 16 English and code tasks", by_category["en16"], scores),
        _aggregate("LongBench, plain mean of the 16 English and code tasks", [PRESETS["en16"]], scores),
    ]


def _aggregate(name: str, groups: Sequence[Sequence[str]], scores: Mapping[str, Mean]) -> Aggregate:
    if missing := {task for group in groups for task in group if task not in scores}:
        return Aggregate(name, None, tuple(task for task in TASKS if task in missing))
    value = round(fmean(fmean(scores[task].value for task in group) for group in groups), 2)
    weighted = [(scores[task], 1 / len(groups) / len(group)) for group in groups for task in group]
    errors = [weight * mean.error for mean, weight in weighted if mean.error is not None]
    error = hypot(*errors) if len(errors) == len(weighted) else None
    return Aggregate(name, Mean(value, error, all(mean.held for mean, _ in weighted)), ())
