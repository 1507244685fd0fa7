"""The official scores as JSON, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from ..store.summaries.aggregates import aggregates, task_score
from ..store.summaries.summary import curves
from .runs import Run, Variant
from .scores import buckets_of, v1_scores, v2_of


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per run its settings and the scores of every policy and budget; what does not exist is None."""
    return [
        {
            "run": run.label,
            "folders": [str(source.folder) for source in run.sources],
            "settings": [source.settings for source in run.sources],
            "results": [_variant(run, variant) for variant in run.variants],
        }
        for run in runs
    ]


def _variant(run: Run, variant: Variant) -> dict[str, Any]:
    found: dict[str, Any] = {"policy": variant[0], "budget": variant[1]}
    tasks = [_task(run, task, length, variant) for task in run.tasks for length in run.lengths(task)]
    by_length = [task for task in run.tasks if task in TASKS and TASKS[task].is_e]
    if tasks:
        found["tasks"] = tasks
    if scores := v1_scores(run, variant):
        found["longbench"] = {
            one.name: {"score": one.value, "missing": list(one.missing)} for one in aggregates(scores)
        }
    if by_length:
        found["longbench_e"] = {task: buckets_of(run, task, variant) for task in by_length}
    if V2 in run.tasks:
        found["longbench_v2"] = v2_of(run, variant)
    texts = curves(row for row in run.texts if (row["policy"], row["budget"]) == variant)
    if texts:
        found["perplexity"] = texts[0].perplexity
    return found


def _task(run: Run, task: str, length: int | None, variant: Variant) -> dict[str, Any]:
    rows = run.of(task, length, variant)
    truncated = [row["truncated"] for row in rows if row.get("truncated") is not None]
    questions = {row["id"] for other in run.variants for row in run.of(task, length, other)}
    return {
        "task": task,
        "length": length,
        "score": task_score([row["score"] for row in rows]),
        "answers": len(rows),
        "missing": len(questions) - len(rows),
        "truncated": sum(truncated) if truncated else None,
    }
