"""The lines of a table, a policy at a budget each, and the rows that belong to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.internals import AUTO, Spans, reads_profile

from ..caches.budgets import FULL, IN_CACHE, Budget, budgets_of
from ..caches.making import make_paged_cache
from ..caches.policy_names import needs_queries, split_name
from ..caches.sizes import arguments_of_memory, tokens_held
from ..data.prompting.prompts import Batch, Prompt
from ..options.settings import Settings, TaskSettings
from ..store.checks import RowKey

#: Tokens that a share is taken of where the prompts are not known yet.
LONG = 1 << 20


@dataclass(frozen=True)
class Variant:
    """One line of a table: a policy at a budget, or the full cache.

    Attributes:
        policy: as `make_policy` takes it, or "auto"; with "@" and an allocator behind it, such as "h2o@cake",
            the budget is shared out among layers or heads.
        positions: where held tokens stand; None = as the settings say, for all variants alike.
    """

    policy: str
    budget: Budget
    positions: str | None = None

    @property
    def name(self) -> str:
        """The policy as rows name it: where its tokens stand is said if it is not their place in the text."""
        return self.policy + (IN_CACHE if self.positions == "cache" and not self.budget.is_full else "")

    @property
    def scorer(self) -> str:
        """The policy without its allocator."""
        return split_name(self.policy)[0]

    @property
    def needs_queries(self) -> bool:
        """Whether its cache has to be told of queries."""
        return not self.budget.is_full and needs_queries(self.policy)

    @property
    def by_probe(self) -> bool:
        """Whether a probe of the model decides what is kept."""
        named = not self.budget.is_full and self.scorer != AUTO
        return named and make_policy(self.scorer).needs.by_probe

    def finds_profile(self, settings: Settings) -> bool:
        """Whether its profile is found by the weights, so that nothing is known before these are read."""
        named = settings.profile is None and self.policy != AUTO
        return named and reads_profile(*split_name(self.policy))

    def block_size(self, settings: Settings) -> int | None:
        """Tokens per block; None = what the cache chooses for bytes."""
        by_cache = settings.block_size is None and self.policy == AUTO and self.budget.in_bytes
        return None if by_cache else settings.block

    def key(self, batch: Batch, prompt: Prompt) -> RowKey:
        """The row of one prompt."""
        return RowKey(batch.task, batch.length, self.policy, self.budget.label, prompt.sample.id)

    def budget_tokens(self, model: Any, settings: Settings, batch: Batch, prompt: Prompt) -> int | None:
        """Tokens held for one prompt, None = all."""
        return tokens_held(self.budget, model, settings, self.policy, shared_length(batch, prompt))


def shared_length(batch: Batch, prompt: Prompt) -> int:
    """Tokens that shares are taken of: the length asked for, or what is compressed."""
    return len(prompt.context) if batch.length is None else batch.length


def variants(settings: Settings) -> list[Variant]:
    """The full cache if it is asked for, then every policy at every budget."""
    budgets = budgets_of(settings)
    full = [Variant(FULL, budget) for budget in budgets if budget.is_full]
    return full + [Variant(name, budget) for name in settings.policies for budget in budgets if not budget.is_full]


def batch_keys(settings: TaskSettings, batch: Batch) -> list[RowKey]:
    """The rows that a batch yields, by variant and prompt."""
    return [variant.key(batch, prompt) for variant in variants(settings) for prompt in batch.prompts]


def check_caches(config: Any, settings: Settings, variants: Iterable[Variant]) -> None:
    """Refuse a policy or a budget that this model cannot have, before anything is read; arguments as of `empty_caches`.

    Raises:
        UserError: with the reason, and the policy and budget.
    """
    config = copy(config)
    if settings.attn_implementation is not None:
        config._attn_implementation = settings.attn_implementation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come where the model is, whose weights may decide
        empty_caches(config, settings, [one for one in variants if not one.finds_profile(settings)])


def empty_caches(config: Any, settings: Settings, variants: Iterable[Variant]) -> dict[str, PagedEvictionCache]:
    """A cache of each policy, by its name in rows.

    Args:
        variants: which caches a run will make.

    Raises:
        UserError: one cannot be, with the reason, and the policy and budget.
    """
    caches: dict[str, PagedEvictionCache] = {}
    for variant in variants:
        budget = variant.budget
        if budget.is_full:
            continue
        size = _size(budget, settings)
        more: dict[str, Any] = {} if variant.positions is None else {"positions": variant.positions}
        caches[variant.name] = make_paged_cache(
            config, settings, variant.policy, f"at {budget.label}", budget=size, protect=None, **more
        )
    return caches


def _size(budget: Budget, settings: Settings) -> int | str | None:
    if budget.memory is not None:
        return f"{budget.memory}B"
    return budget.label if budget.in_bytes else budget.resolve(LONG, settings)


def make_cache(
    model: Any,
    settings: Settings,
    variant: Variant,
    tokens: int | None,
    length: int,
    mask: Tensor | None,
    protect: Sequence[Spans] | None = None,
) -> DynamicCache:
    """An empty cache.

    Args:
        tokens: held per layer and row; None = all.
        length: tokens that shares are taken of, see `shared_length`.
        mask: `[rows, columns]`, of the tokens that are fed first; None = without pads, or the model passes it.
        protect: spans by row, instead of what the settings say.

    Raises:
        UserError: this policy or budget is impossible with this model.
    """
    if tokens is None:
        return DynamicCache(config=model.config)
    label = f"at {variant.budget.label}"
    more: dict[str, Any] = {"budget": tokens, "attention_mask": mask}
    if variant.policy == AUTO and variant.budget.in_bytes:  # spends bytes otherwise than tokens
        more |= {**arguments_of_memory(model, settings, AUTO, variant.budget, length), "budget": tokens}
    instead = {"protect": protect, "positions": variant.positions}
    more |= {name: value for name, value in instead.items() if value is not None}
    return make_paged_cache(model.config, settings, variant.policy, label, **more)
