"""What `--tasks` may name: generated tasks, published ones, those of the user, and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..data import longbench, mathematics, ruler
from ..data.file_task import FileTask
from ..data.longbench import v2
from ..data.longbench.records import FILE_TASKS
from ..data.prompting.chat_template import takes_turns
from ..data.sample import Sample
from ..data.task_files import read_task
from ..errors import UserError
from ..options.settings import TaskSettings
from . import TASK_GROUPS, available_tasks, get_task, make_samples
from .niah import haystack_digest, needle_in_a_haystack, read_haystack

#: Samples per task and length where `--limit` says nothing; those of LongBench all run.
GENERATED_SAMPLES = 64
#: The task whose haystack a user may give.
NIAH = "niah"
#: Whose records lie in a folder, and of which it may hold a part.
_PUBLISHED = {"ruler_data": ruler.TASKS, "mathematics": mathematics.TASKS}
#: All tasks whose records are in files.
PUBLISHED: dict[str, FileTask] = {
    task.name: task for group in (FILE_TASKS, (v2.TASK,), *_PUBLISHED.values()) for task in group
}


def task_names() -> list[str]:
    """All tasks: the generated ones, LongBench, LongBench-E, LongBench v2, other published ones."""
    return [*available_tasks(), *PUBLISHED]


def task_groups() -> dict[str, tuple[str, ...]]:
    """Names of groups, and the tasks in them."""
    published = {group: tuple(task.name for task in tasks) for group, tasks in _PUBLISHED.items()}
    return {**TASK_GROUPS, **longbench.PRESETS, "v2": (v2.NAME,), **published}


def expand(names: Sequence[str], data_dir: str | None = None) -> tuple[str, ...]:
    """The tasks behind these names of tasks and groups, in order, each once.

    Raises:
        UserError: a name is neither, or a folder has some of a group's records; says what there is.
    """
    groups, tasks = task_groups(), task_names()
    expanded: dict[str, None] = {}
    for name in names:
        if name not in tasks and name not in groups:
            raise UserError(_unknown(name, groups, tasks))
        if data_dir is not None and name in _PUBLISHED:
            _refuse_part(name, data_dir)
        expanded |= dict.fromkeys((name,) if name in tasks else groups[name])
    return tuple(expanded)


def _refuse_part(group: str, data_dir: str) -> None:
    """Refuse a group of which the folder holds a part, and name that part."""
    tasks = _PUBLISHED[group]
    there = [task.name for task in tasks if task.is_in(data_dir)]
    if there and len(there) < len(tasks):
        raise UserError(
            f"--data-dir {data_dir} holds {len(there)} of the {len(tasks)} tasks of {group}: --tasks {','.join(there)}"
        )


def own_names(files: Sequence[FileTask]) -> tuple[str, ...]:
    """The names of tasks of the user.

    Raises:
        UserError: one is taken: a file that is called like a task is not reported under its name.
    """
    taken = {*task_names(), *task_groups()}
    for file in files:
        if file.name in taken:
            raise UserError(
                f"{file.own}: {file.name!r} is the name of another task; rename the file. (LongBench's own records are "
                "read by --tasks and --data-dir)"
            )
        taken.add(file.name)
    return tuple(file.name for file in files)


def file_task(name: str, settings: TaskSettings) -> FileTask | None:
    """The task of that name whose records are in files; None for a generated one."""
    own = (read_task(Path(path), settings) for path in settings.task_file)
    return next((task for task in own if task.name == name), PUBLISHED.get(name))


def is_generated(task: str) -> bool:
    """Whether a task makes its own samples, of the length that is asked for."""
    return task in available_tasks()


def is_on_hub(task: str) -> bool:
    """Whether its records are fetched from the Hub, where nothing else is said."""
    return task in PUBLISHED and PUBLISHED[task].hub is not None


def description(task: str) -> str:
    """A line on what a task asks."""
    return PUBLISHED[task].description if task in PUBLISHED else get_task(task).description


def load_samples(task: str, settings: TaskSettings, tokenizer: Any, length: int | None) -> list[Sample]:
    """The first `settings.limit` samples of a task, always the same; they note where `settings.max_new_tokens` leaves
    their protocol.

    Args:
        task: one name that `expand` gives.
        settings: seed and limit, and where records are.
        tokenizer: generated samples are sized by it.
        length: tokens of a generated prompt and its answer; None for other tasks.
    """
    if file := file_task(task, settings):
        return file.samples(settings)
    count = GENERATED_SAMPLES if settings.limit is None else settings.limit
    try:
        buried = task == NIAH and settings.haystack
        chosen = needle_in_a_haystack(read_haystack(settings.haystack)) if buried else task
        samples = make_samples(
            chosen, tokenizer, length or 0, count, settings.seed, in_turns(task, settings, tokenizer)
        )
    except ValueError as error:
        raise UserError(f"{error} (--length)") from error
    return [sample.with_answers_of(settings.max_new_tokens) for sample in samples]


def in_turns(task: str, settings: TaskSettings, tokenizer: Any) -> bool:
    """Whether a generated task is asked in turns of a chat.

    "auto" leaves tasks of examples and of code as they are, as LongBench does, and everything where the template does
    not mark who speaks; there "always" changes nothing either.
    """
    wanted = {"auto": get_task(task).chat, "always": True, "never": False}[settings.chat_template]
    return wanted and takes_turns(tokenizer)


def digests(task: str, settings: TaskSettings) -> dict[str, str] | None:
    """SHA-256 of the data and of the prompt template of a task; None for generated ones, which have a seed
    instead (of niah, the data is the texts of `--haystack`)."""
    if file := file_task(task, settings):
        return file.digests(settings)
    return {"data": haystack_digest(settings.haystack)} if task == NIAH and settings.haystack else None


def data_notes(tasks: Sequence[str], settings: TaskSettings) -> dict[str, str]:
    """Per task of LongBench whose records are not the official ones, what is different."""
    return {task: note for task in tasks if task in PUBLISHED and (note := PUBLISHED[task].note(settings))}


def _unknown(name: str, groups: dict[str, tuple[str, ...]], names: list[str]) -> str:
    close = get_close_matches(name, [*groups, *names], n=1)
    hint = f", did you mean {close[0]!r}?" if close else "."
    return f"unknown task {name!r} (--tasks){hint} Groups: {', '.join(groups)}. `paged-eviction tasks` lists all tasks"
