"""The scheduler's side: how many blocks a request owns. Counts decide; nothing comes back from the workers."""

from dataclasses import dataclass, fields
from math import gcd
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hf_paged_eviction.internals import BlockBudget

from .requests import RequestOptions


@dataclass(frozen=True, kw_only=True)
class EvictionSpec(FullAttentionSpec):
    """A layer that evicts. All such layers have one table of blocks, and share what a request owns.

    Attributes:
        sizes: budget of a request.
        unequal: whether layers or heads hold different numbers of tokens.
        part: largest part of the budget that the heads of one process need, times the number of processes.
        reserve: see `Settings`.
        in_flight: most tokens that are scheduled and not yet computed.
        longest: most tokens of a request.
    """

    sizes: BlockBudget
    unequal: bool
    part: float
    reserve: bool
    in_flight: int
    longest: int

    @classmethod
    def of(cls, spec: FullAttentionSpec, **more: Any) -> "EvictionSpec":
        """A stock spec with these fields."""
        return cls(**{own.name: getattr(spec, own.name) for own in fields(FullAttentionSpec)}, **more)

    @classmethod
    def merge(cls, specs: list[Any]) -> "EvictionSpec":
        """See `KVCacheSpec.merge`. Raises AssertionError, as vLLM expects, if specs differ."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("Layers with different numbers of blocks are in different groups.")
        return specs[0]  # type: ignore[no-any-return]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """See `KVCacheSpec.is_uniform_with_collection`."""
        return all(spec == self for spec in kv_cache_specs.values())

    def kept(self, budget: int | None = None) -> int:
        """Blocks that a request keeps, whatever its length.

        Sets hold whole blocks of eviction and take whole pages, so each leaves less than a page unused; all sets of a
        request together hold its budget.
        """
        tokens = self.sizes.capacity if budget is None else budget
        unused = self.block_size - gcd(self.sizes.block_size, self.block_size) if self.unequal else 0
        return int(cdiv(int(tokens * self.part) + unused, self.block_size))

    def most_blocks(self, tokens: int) -> int:
        """Largest number of blocks of a request with at most so many tokens, while a chunk is read included."""
        most: int = min(cdiv(tokens, self.block_size), self.kept() + 1 + cdiv(self.in_flight, self.block_size))
        return most

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """See `KVCacheSpec.max_memory_usage_bytes`."""
        most: int = self.most_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes
        return most


@dataclass(frozen=True)
class Claim:
    """The blocks of a request.

    Attributes:
        kept: number of its first blocks that it keeps.
        most: largest number of blocks that it will ever need outside of chunks.
    """

    kept: int
    most: int


class EvictionManager(FullAttentionManager):
    """Keeps the first blocks of a request and frees each later one once it is computed.

    The first blocks hold what the workers keep; the others are read once. So a request owns at most `kept` blocks, one
    that new tokens come into, and those of a chunk. A request is admitted if the blocks that live requests may still
    need, and its own, are free: then none is preempted.
    """

    def __init__(self, kv_cache_spec: EvictionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.enable_caching = True  # shows each request to `cache_blocks`, with --no-enable-prefix-caching too
        self.claims: dict[str, Claim] = {}

    def claim(self, request_id: str) -> Claim:
        """The claim of a request; if vLLM has not shown it yet, the largest one."""
        return self.claims.get(request_id) or self._claim(self.kv_cache_spec.kept(), self.kv_cache_spec.longest)

    def _claim(self, kept: int, longest: int) -> Claim:
        return Claim(kept, min(kept + 1, cdiv(min(longest, self.kv_cache_spec.longest), self.block_size)))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """See `SingleTypeKVCacheManager`. With `apply_admission_cap` the request is about to be admitted."""
        spec = self.kv_cache_spec
        if not apply_admission_cap:
            return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)  # type: ignore[no-any-return]
        if not spec.reserve:
            return int(spec.most_blocks(num_tokens)) - self._owned(request_id)
        others = self.req_to_blocks.keys() - {request_id}
        still = sum(max(self.claim(other).most - self._owned(other), 0) for other in others)
        own = self.claim(request_id).most - self._owned(request_id)
        return own + still + (cdiv(spec.in_flight, spec.block_size) if others else 0)

    def _owned(self, request_id: str) -> int:
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See `SingleTypeKVCacheManager`."""
        last = processed_computed_tokens // self.block_size
        self._remove_blocks_in_range(request_id, self.claim(request_id).kept, last)

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[tuple[list[Any], ...], int]:
        """Nothing: what a block holds does not follow from the text."""
        groups = kwargs["kv_cache_group_ids"] if "kv_cache_group_ids" in kwargs else args[2]
        return tuple([] for _ in groups), 0

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Nothing is cached, but here a manager is shown a request, and what it asks for."""
        if request.request_id not in self.claims:
            budget, _ = RequestOptions.of(request.sampling_params.extra_args).within(self.kv_cache_spec.sizes)
            longest = request.num_prompt_tokens + request.max_tokens
            self.claims[request.request_id] = self._claim(self.kv_cache_spec.kept(budget), longest)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See `SingleTypeKVCacheManager`."""
        self.claims.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)  # type: ignore[no-any-return]


def register() -> None:
    """Make the spec known to vLLM."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictionSpec, EvictionManager, uniform_type_base_spec=EvictionSpec)
