"""What was asked for, checked and turned into settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hf_paged_eviction.internals import reads_profile

from ..caches.budgets import parse_budgets
from ..caches.policy_names import attention_for, choose_caches, split_name
from ..data.sources import DATASETS
from ..data.task_files import read_task
from ..errors import UserError
from ..metrics.library import check_library_metric, is_library_metric
from ..models.device import device_for
from ..options.base import flag, words
from ..options.evaluate import EvalOptions, TaskFileOptions
from ..options.files import check_files
from ..options.settings import Settings, TaskSettings, TextSettings
from ..tasks.niah import read_haystack
from ..tasks.suites import NIAH, expand, is_generated, is_on_hub, own_names

LENGTH, TEXT_LENGTH, TEXT_LIMIT = 1024, 2048, 8
S_co = TypeVar("S_co", bound=Settings, covariant=True)


@dataclass(frozen=True)
class Request(Generic[S_co]):
    """One run.

    Attributes:
        settings: what is asked.
        output: folder of results; rows that it has already are not computed again.
        options: what was typed, of which `workers`, `shard` and `log_samples` are used.
    """

    settings: S_co
    output: Path
    options: EvalOptions = field(default=EvalOptions(), compare=False)


def request_of(options: EvalOptions) -> Request[Any]:
    """The run that was asked for."""
    return text_request(options) if options.text is not None else task_request(options)


def task_request(options: EvalOptions) -> Request[TaskSettings]:
    """A run over tasks."""
    return Request(task_settings(options), options.output or Path("results/eval"), options)


def task_settings(options: EvalOptions) -> TaskSettings:
    """A run over tasks."""
    files = [read_task(path, options) for path in options.task_file or ()]
    own = own_names(files)
    for file in files:
        if is_library_metric(file.metric):
            check_library_metric(str(file.metric), options.trust_remote_code)
    listed = words(options.tasks) if not own or "tasks" in options.model_fields_set else []
    tasks = tuple(dict.fromkeys([*expand([name for name in listed if name not in own], options.data_dir), *own]))
    if not tasks:
        raise UserError(f"no task given (--tasks {options.tasks!r}): for example --tasks suite")
    file_options = {name for name in TaskFileOptions.model_fields if getattr(options, name) is not None}
    file_options.discard("max_new_tokens")  # which all tasks take
    if options.chat_template_kwargs and options.chat_template == "never":
        raise UserError("--chat-template-kwargs has no effect with --chat-template never: leave one of them out")
    if file_options and not own:
        raise UserError(f"{', '.join(map(flag, sorted(file_options)))}: only for records of your own; add --task-file")
    if options.dataset:
        raise UserError(
            f"--dataset {options.dataset}: only for texts (--text); a task of your own reads it with --task-file "
            f"{DATASETS}{options.dataset}"
        )
    if options.dataset_revision and not any(map(is_on_hub, tasks)):
        raise UserError("--dataset-revision goes with tasks whose records are on the Hub, or with --text and --dataset")
    generated = [task for task in tasks if is_generated(task)]
    if options.length and not generated:
        raise UserError("--length is for generated tasks only; for LongBench use --max-length")
    if options.haystack:
        if NIAH not in tasks:
            raise UserError(f"--haystack is only for the task {NIAH}: add it to --tasks")
        read_haystack(list(map(str, options.haystack)))
    if "," in options.positions:
        raise UserError(
            f"--positions {options.positions}: both in one run only with --text; with tasks choose one, and run the "
            "other with another --output"
        )
    shared = shared_settings(options)
    if options.teacher_forced and not options.agreement:
        raise UserError("--teacher-forced follows the full cache's answers: add --agreement")
    if options.stop_when_right and (others := [task for task in tasks if task not in generated]):
        raise UserError(
            f"--stop-when-right: {', '.join(others)} {'is' if len(others) == 1 else 'are'} scored by the whole answer, "
            "which ends as the protocol says; leave it out, or run generated tasks (`paged-eviction tasks`) alone"
        )
    values = {
        **options.common(TaskSettings),
        **shared,
        "tasks": tasks,
        "task_file": tuple(map(str, options.task_file or ())),
        "haystack": tuple(map(str, options.haystack or ())),
        "lengths": lengths(options.length or str(LENGTH)) if generated else (),
        # Chunks are compressed one after the other: no two caches see the same.
        "share_prefill": options.share_prefill and options.prefill_chunk_size is None,
    }
    return TaskSettings(**values)


def text_request(options: EvalOptions) -> Request[TextSettings]:
    """A run over texts."""
    files = [str(file) for file in options.text or ()]
    if files and options.dataset:
        raise UserError(f"give files or --dataset {options.dataset}, not both")
    if options.dataset_revision and not options.dataset:
        raise UserError("--dataset-revision goes with --dataset")
    check_files(map(Path, files))
    shared = shared_settings(options)
    values = {
        **options.common(TextSettings),
        **shared,
        "files": tuple(files),
        "limit": options.limit or TEXT_LIMIT,
        "length": length_of(options.length or str(TEXT_LENGTH)),
    }
    return Request(TextSettings(**values), options.output or Path("results/text"), options)


def shared_settings(options: EvalOptions) -> dict[str, Any]:
    """Settings that are not what was typed, and that tasks and texts have in common."""
    wrong = [role for role in options.protected_roles if role not in ("system", "user", "last_user")]
    if wrong:
        raise UserError(f"--protect {wrong[0]}: of the prompts of tasks, write system, user or last_user")
    policies, budgets = choose_caches(options.policies, parse_budgets(options.budgets))
    if options.profile is not None and not any(reads_profile(*split_name(name)) for name in policies):
        raise UserError(
            f"--profile {options.profile}: no policy of this run reads one; those that do are auto, "
            "calibrated, observed and everything@heads"
        )
    for budget in budgets:
        if budget.tokens is not None:
            budget.resolve(budget.tokens, options)
    if options.agreement and not any(budget.is_full for budget in budgets):
        raise UserError(f"--agreement compares with the full cache: add full to --budgets {options.budgets}")
    return {
        "device": device_for(options),
        "attn_implementation": attention_for(policies, options.attn_implementation, options.disposal),
        "policies": policies,
        "budgets": tuple(budget.label for budget in budgets),
    }


def lengths(typed: str) -> tuple[int, ...]:
    """Numbers of tokens, each once."""
    sizes = tuple(dict.fromkeys(map(length_of, words(typed))))
    if not sizes:
        raise UserError(f"length {typed!r}: write numbers of tokens, such as 512,1024")
    return sizes


def length_of(typed: str) -> int:
    """A number of tokens."""
    if not (typed.isascii() and typed.isdecimal() and len(typed) < 10 and int(typed) > 0):
        raise UserError(f"length {typed!r}: write a number of tokens, such as 1024")
    return int(typed)
