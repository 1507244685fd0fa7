"""What a run was asked to do: everything that decides its numbers, and nothing else."""

from __future__ import annotations

from .cache import CacheOptions
from .evaluate import Positions, RunOptions, TaskOptions, TextOptions
from .model import EMBEDDED as EMBEDDED
from .model import ModelOptions


class Settings(ModelOptions, CacheOptions, RunOptions):
    """The model and the caches that a run compares. Fields have the names of options, with checked values.

    Attributes:
        device: of the tokens, and of the model unless it is split.
        policies: without the full cache; empty if that is all that runs.
        budgets: as typed, "full" among them if the full cache runs.
    """

    device: str = "cpu"
    policies: tuple[str, ...]
    budgets: tuple[str, ...]


class TaskSettings(Settings, TaskOptions):
    """A run over tasks: every policy and budget answers the same questions.

    Attributes:
        tasks: names, groups already expanded.
        lengths: tokens per prompt of the generated tasks; the others have their own.
        task_file: files with tasks of the user.
        haystack: files and folders with texts for the task niah.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (1024,)
    task_file: tuple[str, ...] = ()
    haystack: tuple[str, ...] = ()


class TextSettings(Settings, TextOptions):
    """A run over texts: every policy and budget predicts the same tokens.

    Attributes:
        files: plain texts and JSON lines; empty for the held-out texts, or for `dataset`.
        length: most tokens per text.
        positions: of held tokens; both with a comma run every policy with each.
    """

    files: tuple[str, ...]
    limit: int | None = 8
    length: int = 2048
    positions: Positions = "text"
