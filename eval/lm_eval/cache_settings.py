"""The cache that the model arguments of a run ask for."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.allocators import Uniform, make_allocator
from hf_paged_eviction.disposals import make_disposal
from hf_paged_eviction.table.budget import BlockBudget
from hf_paged_eviction.table.memory import parse_bytes

from ..errors import UserError
from ..options.cache import OneCacheOptions
from ..policy_names import shown_queries
from ..sizes import measured


class CacheSettings(OneCacheOptions):
    """What `PagedEvictionCache` takes, checked as far as possible without a model.

    Attributes:
        memory: bytes that a row may take in all paged layers, where `budget` does not say; see `for_model`.
        prefill_chunk_size: tokens of the prompt per forward; None = all at once.
    """

    keep_ratio: float | None = None
    memory: int | str | None = None
    policy: Any = "paged_eviction"
    allocator: Any = "uniform"
    prefill_chunk_size: int | None = None

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> CacheSettings:
        """Those among the arguments of a model, in the cache's own words where they cannot work.

        Raises:
            UserError: values that cannot work; the message says what would.
        """
        found = cls.model_construct(**arguments)
        if found.budget is None and found.keep_ratio is None and found.memory is None:
            raise UserError(
                "the model hf-paged-eviction needs a budget: --model_args budget=1024 (tokens held per layer), "
                "keep_ratio=0.25 (share of each prompt) or memory=64MiB (per row); for the full cache use --model hf"
            )
        chunk = found.prefill_chunk_size
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise UserError(f"prefill_chunk_size={chunk!r} must be a whole number of tokens, at least 1")
        try:
            _ = found._sizes
            _ = found.needs_attention
        except (TypeError, ValueError) as error:
            raise UserError(f"model arguments of hf-paged-eviction: {error}") from error
        return found

    @property
    def _sizes(self) -> BlockBudget:
        return BlockBudget.validate(
            self.budget,
            self.keep_ratio,
            self.block_size,
            make_policy(self.policy).needs.sink_tokens if self.sink_tokens is None else self.sink_tokens,
            self.protected_prefix,
            self.recent_tokens,
            memory=None if self.memory is None else parse_bytes(self.memory),
        )

    @property
    def needs_attention(self) -> bool:
        """Whether the cache looks at queries or attention, and not at keys and values alone."""
        equal = isinstance(make_allocator(self.allocator), Uniform)
        curious = shown_queries(make_policy(self.policy)) or make_disposal(self.disposal).needs_queries
        return curious or not equal

    def check(self, config: Any, attn_implementation: str | None) -> None:
        """Refuse a model that this cache cannot serve, before its weights are read."""
        trial = copy.copy(config)
        if attn_implementation is not None:
            trial._attn_implementation = attn_implementation
        try:
            if self.memory is None:
                self.new_cache(trial, self.tokens(1), None)
            else:
                self._sized_cache(trial)
        except (TypeError, ValueError) as error:
            raise UserError(f"hf-paged-eviction cannot serve this model: {error}") from error

    def for_model(self, model: Any) -> CacheSettings:
        """The same with a budget in tokens, if it is in bytes.

        They are those of one row: a row's answer must not depend on its batch.

        Raises:
            UserError: too few bytes, or layers of unequal widths.
        """
        if self.memory is None:
            return self
        try:
            return self.but(budget=measured(model, self._sized_cache(model.config)), memory=None)
        except ValueError as error:
            raise UserError(f"hf-paged-eviction cannot serve this model: {error}") from error

    def _sized_cache(self, config: Any) -> PagedEvictionCache:
        arguments = {"policy": self.policy, "allocator": self.allocator, **self.cache_arguments}
        return PagedEvictionCache(config, memory=self.memory, **arguments)

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
            policy=self.policy,
            attention_mask=mask,
            allocator=self.allocator,
            **self.cache_arguments,
        )
