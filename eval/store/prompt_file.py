"""The prompts of a run as the model read them: one JSON line per question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..data.prompting.prompts import Batch

PROMPTS = "prompts.jsonl"


def as_lines(batches: Sequence[Batch], tokenizer: Any) -> bytes:
    """Per question: task, length, id; `context`, which is compressed, and `question`, which is read after that (empty
    where it is part of the context), special tokens included; the ids of both; right answers; tokens of an answer."""
    lines = []
    for batch in batches:
        for prompt in batch.prompts:
            record = {
                "task": batch.task,
                "length": batch.length,
                "id": prompt.sample.id,
                "context": tokenizer.decode(prompt.context),
                "question": tokenizer.decode(prompt.question),
                "ids": [*prompt.context, *prompt.question],
                "answers": list(prompt.sample.answers),
                "max_new_tokens": prompt.sample.max_new_tokens,
            }
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines).encode("utf-8", errors="backslashreplace")
