"""The official scores as JSON, for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pandas import DataFrame, Series

from ..data.longbench.v2 import NAME as V2
from ..tables.longbench import aggregates, bucket_scores, task_score, v2_scores
from ..tables.means import curves
from .runs import PLACE, Run, Variant
from .scores import E_TASKS, V1_TASKS


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per run its settings and the scores of every policy and budget; what does not exist is None."""
    return [
        {
            "run": run.label,
            "folders": [str(source.folder) for source in run.sources],
            "settings": [source.settings for source in run.sources],
            "results": list(_results(run)),
        }
        for run in runs
    ]


def _results(run: Run) -> Iterator[dict[str, Any]]:
    questions = run.frame.groupby(list(PLACE))["id"].nunique()
    frames = dict(list(run.frame.groupby(["policy", "budget"])))
    for variant in run.variants:
        yield _variant(run, variant, frames.get(variant, run.frame[:0]), questions)


def _variant(run: Run, variant: Variant, mine: DataFrame, questions: Series) -> dict[str, Any]:
    record: dict[str, Any] = {"policy": variant[0], "budget": variant[1]}
    rows = dict(list(mine.groupby(list(PLACE))))
    if run.places:
        record["tasks"] = [_task(place, rows.get(place, mine[:0]), int(questions[place])) for place in run.places]
    scores = {task: one["score"].tolist() for (task, length), one in rows.items() if not length}
    v1 = {task: task_score(scores.get(task, [])) for task in run.tasks if task in V1_TASKS}
    if v1:
        record["longbench"] = {one.name: {"score": one.value, "missing": list(one.missing)} for one in aggregates(v1)}
    if by_length := [task for task in run.tasks if task in E_TASKS]:
        record["longbench_e"] = {
            task: bucket_scores(zip(own["record_length"], own["score"], strict=True))
            for task in by_length
            for own in [mine[(mine["task"] == task) & mine["record_length"].notna()]]
        }
    if V2 in run.tasks:
        kinds = [metadata or {} for metadata in mine[mine["task"] == V2]["metadata"]]
        named = [(str(kind.get("difficulty")), str(kind.get("length"))) for kind in kinds]
        record["longbench_v2"] = v2_scores(
            (*names, score) for names, score in zip(named, scores.get(V2, []), strict=True)
        )
    texts = curves(row for row in run.texts if (row["policy"], row["budget"]) == variant)
    if len(texts):
        record["perplexity"] = texts["perplexity"].iloc[0].value
    return record


def _task(place: tuple[str, int], rows: DataFrame, questions: int) -> dict[str, Any]:
    truncated = rows["truncated"].dropna()
    return {
        "task": place[0],
        "length": place[1] or None,
        "score": task_score(rows["score"].tolist()),
        "answers": len(rows),
        "missing": questions - len(rows),
        "truncated": None if truncated.empty else int(truncated.sum()),
    }
