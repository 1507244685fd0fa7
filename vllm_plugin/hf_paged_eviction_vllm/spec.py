"""The scheduler's side: how many blocks a request owns. Counts decide; nothing comes back from the workers."""

from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hf_paged_eviction.internals import BlockBudget

from .requests import RequestOptions


@dataclass(frozen=True, kw_only=True)
class EvictionSpec(FullAttentionSpec):
    """A layer that evicts. Layers with equal specs share a table of blocks.

    Attributes:
        kept: number of blocks that a request keeps.
        sizes: budget of a request. None where heads share the blocks: then all requests keep as many.
        reserve: see `Settings`.
        in_flight: most tokens that are scheduled and not yet computed.
    """

    kept: int
    sizes: BlockBudget | None
    reserve: bool
    in_flight: int

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

    def most_blocks(self, tokens: int) -> int:
        """Largest number of blocks of a request with at most so many tokens, while a chunk is read included."""
        most: int = min(cdiv(tokens, self.block_size), self.kept + 1 + cdiv(self.in_flight, self.block_size))
        return most

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """See `KVCacheSpec.max_memory_usage_bytes`."""
        most: int = self.most_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes
        return most


@dataclass
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
        self.claims: dict[str, Claim] = {}

    def _claim(self, request_id: str) -> Claim:
        spec = self.kv_cache_spec
        return self.claims.get(request_id) or Claim(spec.kept, spec.kept + 1)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any
    ) -> int:
        """See `SingleTypeKVCacheManager`. With `apply_admission_cap` the request is about to be admitted."""
        if not apply_admission_cap:
            needed: int = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
            return needed
        spec = self.kv_cache_spec
        if not spec.reserve:
            return int(spec.most_blocks(num_tokens)) - self._owned(request_id)
        others = self.req_to_blocks.keys() - {request_id}
        still = sum(max(self._claim(other).most - self._owned(other), 0) for other in others)
        own = self._claim(request_id).most - self._owned(request_id)
        return own + still + (cdiv(spec.in_flight, spec.block_size) if others else 0)

    def _owned(self, request_id: str) -> int:
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See `SingleTypeKVCacheManager`."""
        kept = self._claim(request_id).kept
        self._remove_blocks_in_range(request_id, kept, processed_computed_tokens // self.block_size)

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[tuple[list[Any], ...], int]:
        """Nothing: what a block holds does not follow from the text."""
        groups = kwargs["kv_cache_group_ids"] if "kv_cache_group_ids" in kwargs else args[2]
        return tuple([] for _ in groups), 0

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Nothing is cached, but here a manager is shown a request, and what it asks for."""
        if request.request_id in self.claims:
            return
        spec, parameters = self.kv_cache_spec, request.sampling_params
        kept = spec.kept
        if spec.sizes is not None and parameters is not None:
            budget, _ = RequestOptions.of(parameters.extra_args).within(spec.sizes)
            kept = min(kept, cdiv(budget, self.block_size))
        longest = cdiv(request.num_prompt_tokens + request.max_tokens, self.block_size)
        self.claims[request.request_id] = Claim(kept, min(kept + 1, longest))

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See `SingleTypeKVCacheManager`."""
        self.claims.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)  # type: ignore[no-any-return]


def register() -> None:
    """Make the spec known to vLLM."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictionSpec, EvictionManager, uniform_type_base_spec=EvictionSpec)
