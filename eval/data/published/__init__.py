"""Benchmarks that others published, besides LongBench: records of their authors, official prompts and metrics."""

from __future__ import annotations

from . import longeval, mathematics, ruler
from .task import PublishedTask

GROUPS: dict[str, tuple[str, ...]] = {
    "ruler_data": tuple(task.name for task in ruler.TASKS),
    "longeval_data": tuple(task.name for task in longeval.TASKS),
    "mathematics": tuple(task.name for task in mathematics.TASKS),
}
TASKS: dict[str, PublishedTask] = {task.name: task for task in (*ruler.TASKS, *longeval.TASKS, *mathematics.TASKS)}

__all__ = ["GROUPS", "TASKS", "PublishedTask"]
