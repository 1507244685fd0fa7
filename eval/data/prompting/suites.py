"""What `--tasks` may name: generated tasks, the tasks of LongBench, and groups of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...metrics import first_line_of, score_sample
from ...metrics.library import is_library_metric, library_score
from ...options.evaluate import TaskFileOptions
from ...options.settings import TaskSettings
from ...tasks import TASK_GROUPS, Sample, available_tasks, get_task, make_samples
from ...tasks.niah import NeedleInAHaystack
from .. import longbench, published
from ..task_files import REGISTERED, TaskFile
from .chat_template import takes_turns
from .haystack_files import haystack_digest, read_haystack

#: Samples per task and length where `--limit` says nothing; those of LongBench all run.
GENERATED_SAMPLES = 64
#: The task whose haystack a user may give.
NIAH = NeedleInAHaystack.name


def task_names() -> list[str]:
    """All tasks: the generated ones, LongBench, LongBench-E, LongBench v2, other published ones, those of plugins."""
    return [*available_tasks(), *longbench.TASKS, longbench.V2, *published.TASKS, *REGISTERED]


def task_groups() -> dict[str, tuple[str, ...]]:
    """Names of groups, and the tasks in them."""
    return {**TASK_GROUPS, **longbench.PRESETS, "v2": (longbench.V2,), **published.GROUPS}


def expand(names: Sequence[str], data_dir: str | None = None) -> tuple[str, ...]:
    """The tasks behind these names of tasks and groups, in order, each once.

    Raises:
        UserError: a name is neither, or a folder has some of a group's records; says what there is.
    """
    groups, known = task_groups(), task_names()
    found: dict[str, None] = {}
    for name in names:
        if name not in known and name not in groups:
            raise UserError(_unknown(name, groups, known))
        if data_dir is not None and name in published.GROUPS:
            _refuse_part(name, data_dir)
        found |= dict.fromkeys((name,) if name in known else groups[name])
    return tuple(found)


def _refuse_part(group: str, data_dir: str) -> None:
    """Refuse a group of which the folder holds a part, and name that part."""
    tasks = published.GROUPS[group]
    there = [task for task in tasks if published.TASKS[task].is_in(data_dir)]
    if there and len(there) < len(tasks):
        raise UserError(
            f"--data-dir {data_dir} holds {len(there)} of the {len(tasks)} tasks of {group}: --tasks {','.join(there)}"
        )


def own_names(files: Sequence[TaskFile]) -> tuple[str, ...]:
    """The names of tasks of the user.

    Raises:
        UserError: one is taken: a file that is called like a task is not reported under its name.
    """
    taken = {*task_names(), *task_groups()}
    names: list[str] = []
    for file in files:
        if file.name in taken:
            raise UserError(
                f"{file.data}: {file.name!r} is the name of another task; rename the file, or give it a YAML file with "
                "`name:`. (LongBench's own records are read by --tasks and --data-dir)"
            )
        taken.add(file.name)
        names.append(file.name)
    return tuple(names)


def own_task(name: str, settings: TaskSettings) -> TaskFile | None:
    """The task of the user that has this name."""
    if name in REGISTERED:
        return TaskFile.read(REGISTERED[name], TaskFileOptions())
    files = (TaskFile.read(Path(path), settings) for path in settings.task_file)
    return next((file for file in files if file.name == name), None)


def is_generated(task: str) -> bool:
    """Whether a task makes its own samples, of the length that is asked for."""
    return task in available_tasks()


def is_on_hub(task: str) -> bool:
    """Whether its records are fetched from the Hub, where nothing else is said."""
    if task in published.TASKS:
        return published.TASKS[task].hub is not None
    return task in longbench.TASKS or task == longbench.V2


def description(task: str) -> str:
    """A line on what a task asks."""
    if is_generated(task):
        return get_task(task).description
    if task in published.TASKS:
        return published.TASKS[task].description
    if task in REGISTERED:
        return f"Of a plugin: {REGISTERED[task]}."
    if task == longbench.V2:
        return "LongBench v2: 503 questions with four choices over long texts."
    return longbench.TASKS[task].description


def load_samples(task: str, settings: TaskSettings, tokenizer: Any, length: int | None) -> list[Sample]:
    """The first `settings.limit` samples of a task, always the same; those of published and generated tasks note it
    where `settings.max_new_tokens` leaves their protocol.

    Args:
        task: one name that `expand` gives.
        settings: seed and limit, and where the records of LongBench are.
        tokenizer: generated samples are sized by it.
        length: tokens of a generated prompt and its answer; None for other tasks.
    """
    if task not in REGISTERED and (own := own_task(task, settings)):
        return own.samples(settings.limit)
    samples, tokens = _samples(task, settings, tokenizer, length), settings.max_new_tokens
    return [
        each
        if tokens in (None, each.max_new_tokens)
        else replace(each, max_new_tokens=tokens, protocol_tokens=each.max_new_tokens)
        for each in samples
    ]


def _samples(task: str, settings: TaskSettings, tokenizer: Any, length: int | None) -> list[Sample]:
    if own := own_task(task, settings):
        return own.samples(settings.limit)
    if task in published.TASKS:
        return published.TASKS[task].samples(settings)
    if not is_generated(task):
        return longbench.load_samples(task, settings)
    if length is None:
        raise UserError(f"{task}: a generated task needs a length (--length)")
    count = GENERATED_SAMPLES if settings.limit is None else settings.limit
    try:
        buried = task == NIAH and settings.haystack
        chosen = NeedleInAHaystack(read_haystack(settings.haystack)) if buried else task
        return make_samples(chosen, tokenizer, length, count, settings.seed, in_turns(task, settings, tokenizer))
    except ValueError as error:
        raise UserError(f"{error} (--length)") from error


def in_turns(task: str, settings: TaskSettings, tokenizer: Any) -> bool:
    """Whether a generated task is asked in turns of a chat.

    "auto" leaves tasks of examples and of code as they are, as LongBench does, and everything where the template does
    not mark who speaks; there "always" changes nothing either.
    """
    wanted = {"auto": get_task(task).chat, "always": True, "never": False}[settings.chat_template]
    return wanted and takes_turns(tokenizer)


def score(sample: Sample, prediction: str, settings: TaskSettings) -> float:
    """How right a prediction is, from 0 to 1, by the metric of its task and the backends in `settings`."""
    if sample.metric is None:
        return float(get_task(sample.task).score(sample, prediction))
    said = first_line_of(prediction) if sample.first_line else prediction
    if is_library_metric(sample.metric):
        return library_score(sample.metric, said, sample.answers)
    return score_sample(
        sample.metric,
        said,
        sample.answers,
        sample.all_classes,
        edit_similarity=settings.edit_similarity,
        rouge=settings.rouge,
    )


def digests(task: str, settings: TaskSettings) -> dict[str, str] | None:
    """SHA-256 of the data and of the prompt template of a task; None for generated ones, which have a seed
    instead (of niah, the data is the texts of `--haystack`)."""
    if own := own_task(task, settings):
        return own.digests
    if is_generated(task):
        return {"data": haystack_digest(settings.haystack)} if task == NIAH and settings.haystack else None
    if task in published.TASKS:
        return published.TASKS[task].digests(settings)
    return {"data": longbench.data_digest(task, settings), "prompt": longbench.prompt_digest(task)}


def data_notes(tasks: Sequence[str], settings: TaskSettings) -> dict[str, str]:
    """Per task of LongBench whose records are not the official ones, what is different."""
    names = [task for task in tasks if task in longbench.TASKS or task == longbench.V2]
    return {task: note for task in names if (note := longbench.data_note(task, settings))}


def _unknown(name: str, groups: dict[str, tuple[str, ...]], known: list[str]) -> str:
    close = get_close_matches(name, [*groups, *known], n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"unknown task {name!r} (--tasks){hint} Groups: {', '.join(groups)}. `paged-eviction tasks` lists all tasks"
