"""What was asked for, checked and turned into settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from hf_paged_eviction import available_policies
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from .budgets import FULL, Budget, parse_budgets
from .environment import best_device
from .errors import UserError
from .policy_names import ALL, ORACLE, choose_policies, needs_queries, split_name
from .presets import get_preset
from .prompting.suites import expand, is_generated
from .settings import AUTO, EMBEDDED, Settings, TaskSettings, TextSettings

if TYPE_CHECKING:
    from .commands.options import Options

DEFAULT_TASKS = "suite"
#: What the paper compares and the simplest there are; `--policies all` is every one.
DEFAULT_POLICIES = "paged_eviction,keydiff,key_norm,value_norm,streaming_llm,recency,random"
DEFAULT_BUDGETS = "6%,12.5%,25%,50%,full"
LENGTH, TEXT_LENGTH, TEXT_LIMIT = 1024, 2048, 8


S_co = TypeVar("S_co", bound=Settings, covariant=True)


@dataclass(frozen=True)
class Request(Generic[S_co]):
    """One run: its settings and its folder."""

    settings: S_co
    output: Path


def task_requests(options: Options) -> list[Request[TaskSettings]]:
    """One run over tasks per model."""
    models: tuple[str, ...] = ()
    if options.preset is not None:
        preset = get_preset(options.preset)
        models = preset.models
        options = replace(
            options, **{name: value for name, value in preset.options.items() if getattr(options, name) is None}
        )
    output = options.output or Path("results") / (options.preset or "eval")
    if options.model is not None or not models:
        return [Request(task_settings(options), output)]
    return [Request(task_settings(replace(options, model=name)), output / name.rpartition("/")[2]) for name in models]


def task_settings(options: Options) -> TaskSettings:
    """A run over tasks."""
    tasks = expand(words(options.tasks or DEFAULT_TASKS))
    if not tasks:
        raise UserError(f"no task given (--tasks {options.tasks!r}): for example --tasks {DEFAULT_TASKS}")
    generated = [task for task in tasks if is_generated(task)]
    if options.length and not generated:
        raise UserError("--length is about generated tasks; the prompts of LongBench have their own: --max-length")
    shared = shared_settings(options)
    if options.agreement and FULL not in shared["budgets"]:
        raise UserError(f"--agreement compares with the full cache: add full to --budgets {options.budgets}")
    return TaskSettings(
        **shared,
        limit=options.limit,
        tasks=tasks,
        lengths=lengths(options.length or str(LENGTH)) if generated else (),
        seed=options.seed,
        question_aware=options.question_aware,
        max_length=options.max_length,
        chat_template=options.chat_template.value,
        data_dir=options.data_dir,
        prefill_chunk_size=options.prefill_chunk_size,
        # Chunks are compressed one after the other: no two caches see the same.
        share_prefill=options.share_prefill and options.prefill_chunk_size is None,
        agreement=options.agreement,
        edit_similarity=options.edit_similarity.value,
        rouge=options.rouge.value,
    )


def text_request(options: Options) -> Request[TextSettings]:
    """A run over texts."""
    files = [str(file) for file in options.files or ()]
    if files and options.dataset:
        raise UserError(f"give files or --dataset {options.dataset}, not both")
    missing = [name for name in files if not Path(name).is_file()]
    if missing:
        raise UserError(f"no such file: {', '.join(missing)}")
    shared = shared_settings(options)
    if any(split_name(name)[0] == ORACLE for name in shared["policies"]):
        raise UserError("oracle: it looks ahead to the answer of the full cache, which only tasks have; leave it out")
    settings = TextSettings(
        **shared,
        files=tuple(files),
        limit=options.limit or TEXT_LIMIT,
        length=whole_number(options.length or str(TEXT_LENGTH)),
        chunk=options.chunk,
    )
    return Request(settings, options.output or Path("results/text"))


def shared_settings(options: Options) -> dict[str, Any]:
    """Settings that tasks and texts have in common."""
    model = options.model or EMBEDDED
    for name in ("tokenizer", "revision"):
        if model == EMBEDDED and getattr(options, name):
            raise UserError(f"the embedded model has its own {name}: leave out --{name}, or name a --model")
    if options.tensor_parallel and options.device_map:
        raise UserError("--tensor-parallel and --device-map both split the model: choose one")
    if options.dataset_revision and not options.dataset:
        raise UserError("--dataset-revision goes with --dataset")
    policies, budgets = choose_caches(options.policies, options.budgets)
    return {
        "model": model,
        "tokenizer": options.tokenizer,
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
        "allow_pickle": options.allow_pickle,
        "dtype": options.dtype.value,
        "device": check_device(options.device or ("cpu" if model == EMBEDDED else best_device())),
        "device_map": value_of(options.device_map),
        "tensor_parallel": options.tensor_parallel,
        "attn_implementation": attention_for(policies, options.attn_implementation),
        "policies": policies,
        "budgets": tuple(budget.label for budget in budgets),
        "block_size": options.block_size or Settings.block_size,
        "heads": options.heads.value,
        "batch_size": batch_size(options.batch_size),
        "dataset": options.dataset,
        "dataset_revision": options.dataset_revision,
    }


def choose_caches(policies: str | None, budgets: str | None) -> tuple[tuple[str, ...], list[Budget]]:
    """Policies without the full cache, and budgets; "full" in either list adds the full cache, once."""
    names = choose_policies(DEFAULT_POLICIES if policies is None else policies)
    every = available_policies() if ALL in names else ()
    chosen = tuple(dict.fromkeys([*every, *(name for name in names if name not in (FULL, ALL))]))
    found = list(parse_budgets(DEFAULT_BUDGETS if budgets is None else budgets))
    if FULL in names:
        found = [each for each in found if chosen and not each.is_full] + list(parse_budgets(FULL))
    if all(each.is_full for each in found):
        chosen = ()
    return chosen, found


def attention_for(policies: Sequence[str], typed: str | None) -> str | None:
    """The attention implementation that these policies need, or the one typed; None for the model's default."""
    curious = [name for name in policies if needs_queries(name)]
    if curious and typed not in (None, PAGED_EVICTION):
        raise UserError(
            f"{', '.join(curious)}: needs to see queries, which --attn-implementation {typed} does not show; "
            f"leave it out, or write {PAGED_EVICTION} (which computes as sdpa does)"
        )
    return PAGED_EVICTION if curious else typed


def words(typed: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in typed.split(",") if word.strip()]


def lengths(typed: str) -> tuple[int, ...]:
    """Numbers of tokens, each once."""
    found = tuple(dict.fromkeys(map(whole_number, words(typed))))
    if not found:
        raise UserError(f"length {typed!r}: write numbers of tokens, such as 512,1024")
    return found


def whole_number(typed: str) -> int:
    """A positive number of tokens."""
    if not is_positive(typed):
        raise UserError(f"length {typed!r}: write a number of tokens, such as 1024")
    return int(typed)


def batch_size(typed: str) -> int | Literal["auto"]:
    """A positive number, or "auto"."""
    if typed == AUTO:
        return AUTO
    if not is_positive(typed):
        raise UserError(f"--batch-size {typed!r}: write a number of prompts, or auto")
    return int(typed)


def is_positive(typed: str) -> bool:
    """Whether this is a whole number from 1 to a billion."""
    return typed.isascii() and typed.isdecimal() and len(typed) < 10 and int(typed) > 0


def value_of(choice: Enum | None) -> Any:
    """The value of a choice that may be left open."""
    return None if choice is None else choice.value


def check_device(name: str) -> str:
    """The name, if torch can run there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used: {reason}") from error
    return name
