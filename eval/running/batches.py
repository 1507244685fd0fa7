"""Prompts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ..data.prompting.prompts import Batch, Prompt, encode, longest_prompt
from ..options.settings import TaskSettings
from ..tasks.suites import is_generated, load_samples
from .batching import start_size

#: Rows of a batch where there is no configuration of the model to find out.
_ROWS = 16


def make_batches(settings: TaskSettings, tokenizer: Any, config: Any = None) -> list[Batch]:
    """All batches of a run, in a fixed order: generated tasks by length, then the others.

    Args:
        settings: what runs.
        tokenizer: a Hugging Face tokenizer.
        config: configuration of the model, for the size of "auto" batches and for the longest prompt where
            `settings.max_length` is None; without it, batches of 16 and the context that the tokenizer knows of.
    """
    generated = [(task, length) for length in settings.lengths for task in settings.tasks if is_generated(task)]
    others = [(task, None) for task in settings.tasks if not is_generated(task)]
    return [
        batch for task, length in [*generated, *others] for batch in _batches(settings, tokenizer, config, task, length)
    ]


def _batches(settings: TaskSettings, tokenizer: Any, config: Any, task: str, length: int | None) -> Iterator[Batch]:
    samples = load_samples(task, settings, tokenizer, length)
    # Generated samples have the length that was asked for.
    max_length = None if is_generated(task) else longest_prompt(settings, tokenizer, config, samples[0])
    prompts = [
        encode(
            sample,
            tokenizer,
            question_aware=settings.question_aware,
            max_length=max_length,
            chat_template=settings.chat_template,
            protect=settings.protected_roles,
        )
        for sample in samples
    ]
    size = settings.batch_size
    if size is None:
        most = max(prompt.tokens + prompt.sample.max_new_tokens for prompt in prompts)
        size = _ROWS if config is None else start_size(settings, config, most)
    yield from (Batch(task, length, rows) for rows in pack(prompts, size))


def pack(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[Prompt, ...]]:
    """Batches of at most `size` prompts, the longest first and as equal in length as can be.

    Prompts with the same context and different questions are in one batch, if they fit.
    """
    first: dict[tuple[int, ...], int] = {}
    for index, prompt in enumerate(prompts):
        first.setdefault(prompt.context, index)
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.context), first[prompt.context]))
    rows: list[Prompt] = []
    for _, same in groupby(ordered, key=lambda prompt: first[prompt.context]):
        group = list(same)
        if rows and len(rows) + len(group) > size >= len(group):
            yield tuple(rows)
            rows = []
        rows += group
        while len(rows) >= size:
            yield tuple(rows[:size])
            rows = rows[size:]
    if rows:
        yield tuple(rows)
