"""The cache that the model arguments of a run ask for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_paged_eviction import EvictionPolicy, PagedEvictionCache, make_policy
from hf_paged_eviction.allocators import BudgetAllocator, Uniform, make_allocator
from hf_paged_eviction.table.budget import BlockBudget

from ..errors import UserError


@dataclass(frozen=True)
class CacheSettings:
    """What `PagedEvictionCache` takes, checked as far as possible without a model.

    Attributes:
        prefill_chunk_size: tokens of the prompt per forward; None = all at once.
        The others are those of `PagedEvictionCache`.

    Raises:
        UserError: values that cannot work; the message says what would.
    """

    budget: int | None
    keep_ratio: float | None
    block_size: int
    policy: str | EvictionPolicy
    heads: str
    sink_tokens: int | None
    protected_prefix: int
    allocator: str | BudgetAllocator
    prefill_chunk_size: int | None

    def __post_init__(self) -> None:
        if self.budget is None and self.keep_ratio is None:
            raise UserError(
                "the model hf-paged-eviction needs a budget: --model_args budget=1024 (tokens held per layer) or "
                "keep_ratio=0.25 (share of each prompt); for the full cache use --model hf"
            )
        chunk = self.prefill_chunk_size
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise UserError(f"prefill_chunk_size={chunk!r} must be a whole number of tokens, at least 1")
        try:
            _ = self._sizes
            _ = self.needs_attention
        except (TypeError, ValueError) as error:
            raise UserError(f"model arguments of hf-paged-eviction: {error}") from error

    @property
    def _sizes(self) -> BlockBudget:
        return BlockBudget.validate(
            self.budget, self.keep_ratio, self.block_size, self.sink_tokens, self.protected_prefix
        )

    @property
    def needs_attention(self) -> bool:
        """Whether the cache looks at queries or attention, and not at keys and values alone."""
        return make_policy(self.policy).needs.queries or not isinstance(make_allocator(self.allocator), Uniform)

    def check(self, config: Any, attn_implementation: str | None) -> None:
        """Refuse a model that this cache cannot serve, before its weights are read."""
        trial = copy.copy(config)
        if attn_implementation is not None:
            trial._attn_implementation = attn_implementation
        try:
            self.new_cache(trial, self.tokens(1), None)
        except (TypeError, ValueError) as error:
            raise UserError(f"hf-paged-eviction cannot serve this model: {error}") from error

    def tokens(self, length: int) -> int:
        """The budget of a prompt of `length` real tokens.

        A `keep_ratio` is resolved for each row, because the cache alone would take it of the padded length, and a
        row's answer must not depend on its batch.
        """
        return self._sizes.resolve(length).capacity

    def new_cache(self, config: Any, tokens: int, mask: Tensor | None) -> PagedEvictionCache:
        """An empty cache for one batch; `mask` `[rows, length]` as for the model."""
        return PagedEvictionCache(
            config,
            budget=tokens,
            block_size=self.block_size,
            policy=self.policy,
            heads=self.heads,  # type: ignore[arg-type]  # checked by the cache
            sink_tokens=self.sink_tokens,
            protected_prefix=self.protected_prefix,
            attention_mask=mask,
            allocator=self.allocator,
        )
