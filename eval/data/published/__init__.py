"""Benchmarks that others published, besides LongBench: records of their authors, official prompts and metrics."""

from __future__ import annotations

from . import helmet, infinitebench, longeval, loogle, mathematics, ruler
from .task import PublishedTask

GROUPS: dict[str, tuple[str, ...]] = {
    "ruler_data": tuple(task.name for task in ruler.TASKS),
    "longeval_data": tuple(task.name for task in longeval.TASKS),
    "infinitebench": tuple(task.name for task in infinitebench.TASKS),
    "loogle": tuple(task.name for task in loogle.TASKS),
    "mathematics": tuple(task.name for task in mathematics.TASKS),
    **{name: tuple(task.name for task in tasks) for name, tasks in helmet.GROUPS.items()},
}
TASKS: dict[str, PublishedTask] = {
    task.name: task
    for task in (*ruler.TASKS, *longeval.TASKS, *infinitebench.TASKS, *loogle.TASKS, *mathematics.TASKS, *helmet.TASKS)
}

__all__ = ["GROUPS", "TASKS", "PublishedTask"]
