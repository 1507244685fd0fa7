"""What a run was asked to do: everything that decides its numbers, and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .budgets import Budget, parse_budget

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model and the caches that a run compares."""

    model: str = EMBEDDED
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    block_size: int = 16
    heads: Literal["shared", "separate"] = "shared"
    batch_size: int = 16
    samples: int = 64

    @property
    def parsed_budgets(self) -> tuple[Budget, ...]:
        return tuple(map(parse_budget, self.budgets))

    def as_json(self) -> dict[str, Any]:
        """The settings as they read back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """A run over tasks: every policy and budget answers the same questions."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (1024,)
    seed: int = 0
    question_aware: bool = False


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """A run over texts: every policy and budget predicts the same tokens."""

    files: tuple[str, ...]
    length: int = 2048
    chunk: int = 64
