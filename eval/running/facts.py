"""What is written down of a run besides its settings."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ..caches.plugins import plugin_facts
from ..data.prompting.prompts import Batch, Prompt
from ..grouping import grouped
from ..models.environment import commit, hardware, versions
from ..options.settings import TaskSettings
from ..tasks.suites import digests


def place_facts(processes: int) -> dict[str, Any]:
    """Software, that of others which registered something included, and hardware."""
    return {
        "versions": versions(),
        "commit": commit(),
        "plugins": plugin_facts(),
        "hardware": hardware(processes),
    }


def task_facts(settings: TaskSettings, batches: Sequence[Batch]) -> dict[str, Any]:
    """Per task: where its data came from, and what became of the prompts.

    `ids_sha256` is the digest of all token ids that the model reads and of the lengths of answers, in the order of the
    samples' names. Two runs that ask the same have the same digest, whatever their batches.
    """
    return {
        "tasks": {
            task: _prompt_facts(settings, task, [prompt for batch in task_batches for prompt in batch.prompts])
            for task, task_batches in grouped(batches, lambda batch: batch.task).items()
        }
    }


def _prompt_facts(settings: TaskSettings, task: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    lengths = [prompt.tokens for prompt in prompts]
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda prompt: prompt.sample.id):
        digest.update(array("q", (*prompt.context, -1, *prompt.question, -2, prompt.sample.max_new_tokens)).tobytes())
    return {
        "samples": len(prompts),
        "truncated": sum(prompt.truncated for prompt in prompts),
        "chat_template": sum(prompt.chat for prompt in prompts),
        "prompt_tokens": {
            "mean": round(sum(lengths) / len(lengths), 1),
            "longest": max(lengths),
            "shortest": min(lengths),
        },
        "ids_sha256": digest.hexdigest(),
        "sha256": digests(task, settings),
    }


def text_facts(texts: Mapping[str, array[int]]) -> dict[str, Any]:
    """Per text: its tokens, and the SHA-256 of their ids."""
    return {
        "texts": {
            name: {"tokens": len(ids), "ids_sha256": hashlib.sha256(array("q", ids).tobytes()).hexdigest()}
            for name, ids in texts.items()
        }
    }
