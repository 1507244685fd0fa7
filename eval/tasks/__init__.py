"""Long-context tasks, sized by any tokenizer and the same for everyone who uses the same seed.

A sample is a function of (task, tokenizer, length, seed, index) and of the Python version, whose standard library is
part of the filler text.
"""

from __future__ import annotations

from .few_shot import FewShot
from .held_out import held_out_texts
from .kv_recall import KvRecall
from .kv_recall_many import KvRecallMany
from .next_line import NextLine
from .passkey import Passkey
from .sample import MAX_QUESTION_TOKENS, Sample
from .span_copy import SpanCopy
from .task import NeedleTask, Task, Tokenizer
from .variable_tracking import VariableTracking

_TASKS: dict[str, Task] = {
    task.name: task
    for task in (Passkey(), KvRecall(), KvRecallMany(), VariableTracking(), FewShot(), SpanCopy(), NextLine())
}


def available_tasks() -> list[str]:
    """Names of all tasks."""
    return list(_TASKS)


def get_task(name: str) -> Task:
    """The task of that name."""
    try:
        return _TASKS[name]
    except KeyError:
        raise ValueError(f"unknown task {name!r}; the tasks are: {', '.join(_TASKS)}") from None


def make_samples(task: str | Task, tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[Sample]:
    """The first `count` samples of a task at one length and seed."""
    chosen = get_task(task) if isinstance(task, str) else task
    return [chosen.make(tokenizer, length, index, seed) for index in range(count)]


__all__ = [
    "MAX_QUESTION_TOKENS",
    "NeedleTask",
    "Sample",
    "Task",
    "Tokenizer",
    "available_tasks",
    "get_task",
    "held_out_texts",
    "make_samples",
]
