"""What a run was asked to do: everything that decides its numbers, and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .budgets import Budget, parse_budget

EMBEDDED = "embedded"
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model and the caches that a run compares.

    Attributes:
        model, tokenizer, revision: what is loaded; None for the model's own tokenizer and the newest revision.
        trust_remote_code: Python files that come with the model or the tokenizer are run.
        allow_pickle: weights may be something else than safetensors.
        dtype: "auto" is float32 on a CPU and the checkpoint's own precision elsewhere.
        device: where the tokens go, and the model if it is on one device.
        device_map: "auto" lets accelerate split the layers over all devices.
        tensor_parallel: every process of a `torchrun` holds a part of each layer.
        attn_implementation: None is the model's default.
        policies: without the full cache; empty if that is all that runs.
        budgets: as typed, "full" among them if the full cache runs.
        heads: one decision for all KV heads of a layer, or one for each.
        batch_size: prompts, or texts, that run together; "auto" finds out.
        limit: samples per task and length, or texts; None is the default of the task.
        dataset, dataset_revision: a dataset on the Hub instead of the built-in source.
    """

    model: str = EMBEDDED
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: str = AUTO
    device: str = "cpu"
    device_map: Literal["auto"] | None = None
    tensor_parallel: bool = False
    attn_implementation: str | None = None
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    block_size: int = 16
    heads: Literal["shared", "separate"] = "shared"
    batch_size: int | Literal["auto"] = AUTO
    limit: int | None = None
    dataset: str | None = None
    dataset_revision: str | None = None

    @property
    def parsed_budgets(self) -> tuple[Budget, ...]:
        return tuple(map(parse_budget, self.budgets))

    def as_json(self) -> dict[str, Any]:
        """The settings as they read back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """A run over tasks: every policy and budget answers the same questions.

    Attributes:
        tasks: names, groups already expanded.
        lengths: tokens per prompt of the generated tasks; the others have their own.
        seed: which questions are drawn, for generated tasks.
        question_aware: whether the question is in the part of the prompt that is compressed.
        max_length: longer prompts lose their middle; None is the model's context minus the answer.
        chat_template: "auto" follows the rule of each task.
        data_dir: a folder or a zip with one JSON-lines file per task.
        prefill_chunk_size: tokens per forward of the prompt; None reads it at once.
        share_prefill: the prompt is read once for all policies and budgets.
        agreement: compare every answer with that of the full cache.
        edit_similarity, rouge: backends of the metrics; the first of each is official.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (1024,)
    seed: int = 0
    question_aware: bool = True
    max_length: int | None = None
    chat_template: Literal["auto", "always", "never"] = AUTO
    data_dir: str | None = None
    prefill_chunk_size: int | None = None
    share_prefill: bool = True
    agreement: bool = False
    edit_similarity: Literal["difflib", "rapidfuzz"] = "difflib"
    rouge: Literal["official", "rouge_score"] = "official"


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """A run over texts: every policy and budget predicts the same tokens.

    Attributes:
        files: plain texts and JSON lines; empty for the held-out texts, or for `dataset`.
        length: most tokens per text.
        chunk: tokens per forward.
    """

    files: tuple[str, ...]
    limit: int | None = 8
    length: int = 2048
    chunk: int = 64
