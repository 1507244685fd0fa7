"""Long-context tasks, sized by any tokenizer and the same for everyone who uses the same seed.

A sample is a function of (task, tokenizer, length, seed, index) and of the Python version, whose standard library is
part of the filler text.
"""

from __future__ import annotations

from ..data.library import held_out_texts
from ..data.sample import Sample
from .niah import needle_in_a_haystack
from .ruler import RULER
from .suite import SUITE
from .task import MAX_QUESTION_TOKENS, NeedleTask, Task, Tokenizer

_GROUPS: dict[str, tuple[Task, ...]] = {
    "suite": SUITE,
    "ruler": RULER,
    "niah": (needle_in_a_haystack(),),
}
_TASKS: dict[str, Task] = {task.name: task for group in _GROUPS.values() for task in group}

TASK_GROUPS: dict[str, tuple[str, ...]] = {name: tuple(task.name for task in group) for name, group in _GROUPS.items()}
"""Names of tasks that belong together. The suite is what the embedded model was trained for."""


def available_tasks() -> list[str]:
    """Names of all tasks."""
    return list(_TASKS)


def get_task(name: str) -> Task:
    """The task of that name."""
    try:
        return _TASKS[name]
    except KeyError:
        raise ValueError(f"unknown task {name!r}; the tasks are: {', '.join(_TASKS)}") from None


def make_samples(
    task: str | Task, tokenizer: Tokenizer, length: int, count: int, seed: int = 0, chat: bool = False
) -> list[Sample]:
    """The first `count` samples of a task at one length and seed, as plain text or for a chat."""
    chosen = get_task(task) if isinstance(task, str) else task
    return [chosen.make(tokenizer, length, index, seed, chat) for index in range(count)]


__all__ = [
    "MAX_QUESTION_TOKENS",
    "TASK_GROUPS",
    "NeedleTask",
    "Sample",
    "Task",
    "Tokenizer",
    "available_tasks",
    "get_task",
    "held_out_texts",
    "make_samples",
]
