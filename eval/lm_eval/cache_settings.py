"""The cache that the model arguments of a run ask for, and whose answers a file holds."""

from __future__ import annotations

import copy
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from hf_paged_eviction import CacheOptions, PagedEvictionCache, make_allocator, make_disposal, make_policy
from hf_paged_eviction.internals import AUTO, Uniform, first_tokens, reads_profile
from hf_paged_eviction.options.cache_options import BLOCK_SIZE
from hf_paged_eviction.table.budget import BlockBudget

from ..caches.making import profile_noted
from ..caches.sizes import measured
from ..errors import UserError
from ..store.results import differences


@dataclass(frozen=True)
class CacheSettings(CacheOptions):
    """What `PagedEvictionCache` takes, checked as far as possible without a model. A budget in bytes is that of a row;
    see `for_model`.

    Attributes:
        prefill_chunk_size: tokens of the prompt per forward; None = all at once.

    Raises:
        UserError: values that cannot work; the message says what would.
    """

    prefill_chunk_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        chunk = self.prefill_chunk_size
        try:
            if self.budget is None:
                raise ValueError(
                    "the cache needs a budget: --model_args budget=1024 (tokens held per layer), budget=25% (share of "
                    "each prompt) or budget=64MiB (per row); for the full cache use --model hf"
                )
            if chunk is not None and (type(chunk) is not int or chunk < 1):
                raise ValueError(f"prefill_chunk_size={chunk!r} must be a whole number of tokens, at least 1")
            if self.sizes.memory_share is not None:
                raise ValueError(
                    f"budget={self.budget!r}: prompts differ in length, and bytes are the same for all of them. Give "
                    "budget=64MiB (per row), or budget=25% (share of the tokens of each prompt)"
                )
            _ = self.needs_attention
        except (TypeError, ValueError) as error:
            raise UserError(f"model arguments of hf-paged-eviction: {error}") from error

    @property
    def _scorer(self) -> Any:
        """What decides as far as is known without a model."""
        return make_policy("paged_eviction" if self.policy == AUTO else self.policy)

    @property
    def sizes(self) -> BlockBudget:
        """What is held."""
        budget: Any = self.budget  # a list is refused
        block_size = BLOCK_SIZE if self.block_size is None else self.block_size
        sinks = first_tokens(self.sink_tokens, self._scorer, block_size)
        return BlockBudget.validate(budget, block_size, sinks, self.recent_tokens, self.protect)

    @property
    def needs_attention(self) -> bool:
        """Whether the cache looks at queries or attention, and not at keys and values alone."""
        equal = isinstance(make_allocator(self.allocator or "uniform"), Uniform)
        return self._scorer.needs.queries or make_disposal(self.disposal).needs_queries or not equal

    def check(self, config: Any, attn_implementation: str | None) -> None:
        """Refuse a model that this cache cannot serve, before its weights are read."""
        if self.profile is None and self.policy != AUTO and reads_profile(self.policy, self.allocator):
            return  # it is found by the weights
        trial = copy.copy(config)
        if attn_implementation is not None:
            trial._attn_implementation = attn_implementation
        try:
            self.new_cache(trial, self.budget if self.sizes.memory else self.tokens(1))
        except (TypeError, ValueError) as error:
            raise UserError(f"hf-paged-eviction cannot serve this model: {error}") from error

    def for_model(self, model: Any) -> CacheSettings:
        """The same with a budget in tokens, if it is in bytes.

        They are those of one row: a row's answer must not depend on its batch.

        Raises:
            UserError: too few bytes, or layers of unequal widths.
        """
        if self.sizes.memory is None:
            return self
        try:
            return replace(self, **measured(model, self.new_cache(model.config, self.budget), self.policy))
        except ValueError as error:
            raise UserError(f"hf-paged-eviction cannot serve this model: {error}") from error

    def tokens(self, length: int) -> int:
        """The budget of a prompt of `length` real tokens.

        A share is resolved for each row, because the cache alone would take it of the padded length, and a
        row's answer must not depend on its batch.
        """
        return self.sizes.resolve(length).capacity

    def new_cache(self, config: Any, budget: Any, mask: Tensor | None = None) -> PagedEvictionCache:
        """An empty cache for one batch; `mask` `[rows, length]` as for the model."""
        options = {field.name: getattr(self, field.name) for field in fields(CacheOptions)}
        with profile_noted():
            return PagedEvictionCache(config, **{**options, "budget": budget, "attention_mask": mask})

    @property
    def labels(self) -> dict[str, Any]:
        """The settings as they are written down, a policy in its usual spelling."""
        policy = self.policy
        if policy != AUTO and not reads_profile(policy, None):
            policy = make_policy(policy)
        return {name: getattr(value, "label", value) for name, value in {**vars(self), "policy": policy}.items()}


#: Arguments of a model that are ours.
OURS = [field.name for field in fields(CacheSettings) if field.name != "static"]
#: Beside the answers that the harness keeps in a file, which it finds by digests.
_OWNER = "hf_paged_eviction"


def own_answers(answers: MutableMapping[str, Any], meaning: dict[str, Any]) -> None:
    """Write down what decides the answers of a file, or compare.

    Args:
        answers: what the harness keeps in the file, by the digest of a question.
        meaning: what decides an answer besides the question.

    Raises:
        UserError: they are those of another model or cache, or nobody knows whose.
    """
    if len(answers) and _OWNER not in answers:
        raise UserError("--use_cache: nothing says of which model and cache the answers in this file are: give another")
    if changed := differences(json.loads(answers.get(_OWNER, "{}")), meaning) if len(answers) else []:
        raise UserError(
            f"--use_cache: the answers in this file are of other settings ({', '.join(changed)}), and are found by the "
            "question alone: give a file of its own for each"
        )
    answers[_OWNER] = json.dumps(meaning)
