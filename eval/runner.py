"""Answer one batch of questions under every policy and budget."""

from __future__ import annotations

from collections.abc import Iterator, Set
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache

from .budgets import FULL, Budget
from .errors import UserError
from .prefill import can_share, pad_left, read, replay
from .prompts import Batch
from .results import Row
from .settings import Settings, TaskSettings
from .tasks import get_task


class RowKey(NamedTuple):
    """What a row is about; a run that is continued skips the rows it finds."""

    task: str
    length: int
    policy: str
    budget: str
    id: str


@dataclass(frozen=True)
class Variant:
    """One line of a table: a policy at a budget, or the full cache."""

    policy: str
    budget: Budget


def variants(settings: Settings) -> list[Variant]:
    """The full cache if it is asked for, then every policy at every budget."""
    budgets = settings.parsed_budgets
    full = [Variant(FULL, budget) for budget in budgets if budget.is_full]
    return full + [Variant(name, budget) for name in settings.policies for budget in budgets if not budget.is_full]


def row_key(row: Row) -> RowKey:
    """The identity of a finished row."""
    return RowKey(*(row[name] for name in RowKey._fields))


def batch_keys(settings: TaskSettings, batch: Batch) -> list[RowKey]:
    """The rows that a batch yields, in order."""
    return [
        RowKey(batch.task, batch.length, variant.policy, variant.budget.label, sample.id)
        for variant in variants(settings)
        for sample in batch.samples
    ]


def make_cache(model: Any, settings: Settings, variant: Variant, length: int, mask: Tensor) -> DynamicCache:
    """An empty cache; `mask` `[rows, columns]` covers the tokens it will be given first."""
    tokens = variant.budget.resolve(length, settings.block_size)
    if tokens is None:
        return DynamicCache(config=model.config)
    try:
        return PagedEvictionCache(
            model.config,
            budget=tokens,
            block_size=settings.block_size,
            policy=variant.policy,
            heads=settings.heads,
            attention_mask=mask,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{variant.policy} at {variant.budget.label}: {error}") from error


class BatchRun:
    """One batch on one model.

    The first part of the prompts is read once with a full cache and replayed into every other cache, where that
    is all a layer remembers; a model with sliding or linear layers reads it again for every cache.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch) -> None:
        self.model, self.tokenizer, self.settings, self.batch = model, tokenizer, settings, batch
        pad_id = tokenizer.pad_token_id
        self.pad_id: int = tokenizer.eos_token_id or 0 if pad_id is None else pad_id
        self.ids, self.mask = pad_left(batch.prompts, self.pad_id, settings.device)
        self.split = self.ids.shape[1] - batch.window
        self.first: DynamicCache | None = None

    def rows(self, done: Set[RowKey]) -> Iterator[list[Row]]:
        """Rows of one variant after the other, without those already `done`."""
        for variant in variants(self.settings):
            missing = [
                index
                for index, sample in enumerate(self.batch.samples)
                if RowKey(self.batch.task, self.batch.length, variant.policy, variant.budget.label, sample.id)
                not in done
            ]
            if missing:
                predictions = self.predict(variant)
                yield [self._row(variant, index, predictions[index]) for index in missing]

    def predict(self, variant: Variant) -> list[str]:
        """The model's answers, one per sample."""
        cache = self.prefilled(variant)
        limits = [sample.max_new_tokens for sample in self.batch.samples]
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=self.ids,
                attention_mask=self.mask,
                past_key_values=cache,
                max_new_tokens=max(limits),
                do_sample=False,
                pad_token_id=self.pad_id,
            )
        answers = output[:, self.ids.shape[1] :].tolist()
        ends = end_tokens(self.model)
        # A row's own limit and end, so that an answer does not depend on the other rows of its batch.
        cut = [until_end(tokens[:limit], ends) for tokens, limit in zip(answers, limits, strict=True)]
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in cut]

    def prefilled(self, variant: Variant) -> DynamicCache:
        """A cache that has seen the first part of the prompts and has been compressed once."""
        mask = self.mask[:, : self.split]
        if self.first is None:
            self.first = DynamicCache(config=self.model.config)
            read(self.model, self.ids[:, : self.split], mask, self.first)
        if variant.budget.is_full:
            return deepcopy(self.first)
        cache = make_cache(self.model, self.settings, variant, self.batch.length, mask)
        if can_share(self.first):
            replay(self.first, cache)
        else:
            read(self.model, self.ids[:, : self.split], mask, cache)
        return cache

    def _row(self, variant: Variant, index: int, prediction: str) -> Row:
        sample = self.batch.samples[index]
        score = get_task(self.batch.task).score(sample, prediction)
        return {
            "task": self.batch.task,
            "length": self.batch.length,
            "policy": variant.policy,
            "budget": variant.budget.label,
            "budget_tokens": variant.budget.resolve(self.batch.length, self.settings.block_size),
            "block_size": self.settings.block_size,
            "id": sample.id,
            "prompt_tokens": len(self.batch.prompts[index]),
            "prediction": prediction,
            "answers": list(sample.answers),
            "score": float(score),
            "metadata": sample.metadata,
        }


def end_tokens(model: Any) -> frozenset[int]:
    """Ids that end an answer."""
    ends = model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or [])


def until_end(tokens: list[int], ends: Set[int]) -> list[int]:
    """The tokens before the first one that ends the answer."""
    return tokens[: next((index for index, token in enumerate(tokens) if token in ends), len(tokens))]


def run_batch(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, done: Set[RowKey]
) -> Iterator[list[Row]]:
    """All missing rows of one batch."""
    return BatchRun(model, tokenizer, settings, batch).rows(done)
