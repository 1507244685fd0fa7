"""LongBench on a real model: the rows of `benchmarks/longbench_rows.py`."""

from __future__ import annotations

from collections.abc import Iterator

import memory_tables
from longbench_rows import KEPT
from pandas import DataFrame, read_json
from writing import table

from hf_paged_eviction_eval.data.longbench import CATEGORIES, PRESETS, TASKS

_CACHES = {"full": "full cache", **memory_tables.CACHES, "streaming_llm": "`streaming_llm`"}
_BUDGETS = {"full": "1", "12.5% of memory": "1/8", "512": "512 tokens"}


def longbench(model: str) -> str:
    """Scores of a model by category, each the mean of its tasks."""
    rows = read_json(KEPT / f"{model}.jsonl.gz", lines=True, dtype={"budget": str})
    rows = rows.assign(score=100 * rows["score"], category=rows["task"].map(lambda name: TASKS[name].category))
    shown = [name for name in CATEGORIES if (rows["category"] == name).any()]
    header = ("cache", "memory", *map(_title, shown), f"mean of {rows['task'].nunique()}", "less than the full cache")
    return f"{table(header, _lines(rows, shown))}\n\n{_note(rows)}"


def _title(category: str) -> str:
    return category.replace("_doc_qa", "-doc QA").replace("_", "-")


def _lines(rows: DataFrame, shown: list[str]) -> Iterator[list[str]]:
    full = rows[rows["cache"] == "full"]
    for budget, memory in _BUDGETS.items():
        for name, title in _CACHES.items():
            own = rows[(rows["cache"] == name) & (rows["budget"] == budget)]
            if len(own) == len(full):
                tasks = own.groupby("task")["score"].mean()
                means = (tasks[own.loc[own["category"] == one, "task"].unique()].mean() for one in shown)
                yield [title, memory, *(f"{mean:.1f}" for mean in means), f"{tasks.mean():.1f}", _less(full, own)]


def _less(full: DataFrame, own: DataFrame) -> str:
    """How much lower the mean of the tasks is, and the standard error over records, of which both answered the same."""
    if (own["cache"] == "full").all():
        return "0"
    pairs = full.merge(own, on=["task", "id"], suffixes=("_full", ""))
    by_task = (pairs["score_full"] - pairs["score"]).groupby(pairs["task"])
    error = (by_task.var() / by_task.count()).sum() ** 0.5 / by_task.ngroups
    return f"{by_task.mean().mean():.1f} ± {error:.1f}"


def _note(rows: DataFrame) -> str:
    full = rows[rows["cache"] == "full"]
    least, most = full.groupby("task").size().agg(["min", "max"])
    official = sum(TASKS[name].samples for name in PRESETS["en16"])
    return (
        f"{len(full)} of the {official:,} records, {least} to {most} of a task: a subset, whose scores are not "
        f"LongBench's. {full['truncated'].sum()} prompts lost their middle."
    )
