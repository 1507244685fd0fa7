"""What was typed, checked and turned into settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_paged_eviction import available_policies

from .budgets import parse_budgets
from .errors import UserError
from .settings import EMBEDDED, TaskSettings, TextSettings
from .tasks import available_tasks

LENGTH, SAMPLES = 1024, 64
TEXT_LENGTH, TEXT_SAMPLES = 2048, 8


@dataclass(frozen=True)
class Shared:
    """Options that tasks and texts have in common, as typed."""

    model: str
    tokenizer: str | None
    dtype: str
    device: str
    policies: str | None
    budgets: str
    block_size: int
    heads: str
    batch_size: int

    def checked(self) -> dict[str, Any]:
        """Arguments of the settings."""
        if self.model == EMBEDDED and self.tokenizer:
            raise UserError("the embedded model has its own tokenizer: leave out --tokenizer, or name a --model")
        budgets = parse_budgets(self.budgets)
        return {
            **vars(self),
            "device": check_device(self.device),
            "policies": choose("policy", self.policies, available_policies()),
            "budgets": tuple(budget.label for budget in budgets),
        }


def task_settings(
    shared: Shared,
    tasks: str | None,
    lengths: str | None,
    samples: int | None,
    seed: int,
    question_aware: bool,
) -> TaskSettings:
    """A run over tasks; None means the default."""
    return TaskSettings(
        **shared.checked(),
        tasks=choose("task", tasks, available_tasks()),
        lengths=tuple(map(whole_number, (lengths or str(LENGTH)).split(","))),
        samples=samples or SAMPLES,
        seed=seed,
        question_aware=question_aware,
    )


def text_settings(
    shared: Shared, files: Sequence[Path], length: str | None, samples: int | None, chunk: int
) -> TextSettings:
    """A run over texts; None means the default."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"no such file: {', '.join(missing)}")
    return TextSettings(
        **shared.checked(),
        files=tuple(map(str, files)),
        length=whole_number(length or str(TEXT_LENGTH)),
        samples=samples or TEXT_SAMPLES,
        chunk=chunk,
    )


def choose(kind: str, typed: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The names typed, in that order and once each; all that are known if nothing was typed."""
    if typed is None:
        return tuple(known)
    names = tuple(dict.fromkeys(name.strip() for name in typed.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"unknown {kind} {', '.join(unknown) or repr(typed)}; choose from {', '.join(known)}")
    return names


def whole_number(typed: str) -> int:
    """A positive number of tokens."""
    if not typed.strip().isdecimal() or int(typed) < 1:
        raise UserError(f"length {typed!r}: write a number of tokens, such as 1024")
    return int(typed)


def check_device(name: str) -> str:
    """The name, if torch can run there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts when it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used: {reason}") from error
    return name
