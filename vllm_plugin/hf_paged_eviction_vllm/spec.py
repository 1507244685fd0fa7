"""The scheduler's side: how many blocks a request owns. Counts decide; nothing comes back from the workers."""

from bisect import bisect_right
from dataclasses import dataclass, fields
from math import inf
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
        sizes: budget of a request.
        needs: pairs of a length of text, rising, and the blocks that a request needs from that length on, once its
            sets have chosen their tokens. Empty where all sets are equal.
        foreseen: length of text by which sets choose if single tokens have filled them; None = they stay equal.
        reserve: see `Settings`.
        in_flight: most tokens that are scheduled and not yet computed.
    """

    sizes: BlockBudget
    needs: tuple[tuple[int, int], ...]
    foreseen: int | None
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

    @property
    def equal(self) -> int:
        """Blocks of a request whose sets are equal."""
        return int(cdiv(self.sizes.capacity, self.block_size))

    def chosen(self, length: int) -> int:
        """Blocks that a request keeps whose sets have chosen at this length of text."""
        place = bisect_right(self.needs, length, key=lambda need: need[0])
        return self.needs[max(place - 1, 0)][1] if self.needs else self.equal

    def kept(self, length: float = inf) -> int:
        """Most blocks that a request keeps until it has read this text; its sets may choose after any token."""
        return max([self.equal, *(blocks for begin, blocks in self.needs if begin <= length)])

    def most_blocks(self, tokens: int) -> int:
        """Largest number of blocks of a request with at most so many tokens, while a chunk is read included."""
        most: int = min(cdiv(tokens, self.block_size), self.kept() + 1 + cdiv(self.in_flight, self.block_size))
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
        text: tokens that it reads before it generates, or one more than its budget if it fills that by single tokens.
        chosen: its tokens when its sets chose last.
    """

    kept: int
    most: int
    text: int
    chosen: int


class EvictionManager(FullAttentionManager):
    """Keeps the first blocks of a request and frees each later one once it is computed.

    The first blocks hold what the workers keep; the others are read once. So a request owns at most `kept` blocks, one
    that new tokens come into, and those of a chunk. A request is admitted if the blocks that live requests may still
    need, and its own, are free: then none is preempted.
    """

    def __init__(self, kv_cache_spec: EvictionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.claims: dict[str, Claim] = {}

    def claim(self, request_id: str, text: float = inf) -> Claim:
        """The claim of a request; if vLLM has not shown it yet, that of one with so many tokens."""
        kept = self.kv_cache_spec.kept(text)
        return self.claims.get(request_id) or Claim(kept, kept + 1, 0, 0)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """See `SingleTypeKVCacheManager`. With `apply_admission_cap` the request is about to be admitted."""
        spec = self.kv_cache_spec
        if not apply_admission_cap:
            if request_id in self.claims and num_tokens > max(total_computed_tokens + 1, spec.sizes.capacity):
                self.claims[request_id].chosen = num_tokens
            return super().get_num_blocks_to_allocate(  # type: ignore[no-any-return]
                request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
            )
        if not spec.reserve:
            return int(spec.most_blocks(num_tokens)) - self._owned(request_id)
        others = self.req_to_blocks.keys() - {request_id}
        still = sum(max(self.claim(other).most - self._owned(other), 0) for other in others)
        own = self.claim(request_id, num_tokens).most - self._owned(request_id)
        return own + still + (cdiv(spec.in_flight, spec.block_size) if others else 0)

    def _owned(self, request_id: str) -> int:
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See `SingleTypeKVCacheManager`."""
        claim = self.claim(request_id)
        if 0 < claim.text <= processed_computed_tokens:  # its sets have chosen for the last time
            before, claim.kept = claim.kept, self.kv_cache_spec.chosen(claim.chosen)
            claim.most, claim.text = min(claim.most, claim.kept + 1), 0
            self._remove_blocks_in_range(request_id, claim.kept, before)  # vLLM frees those behind up to a gap alone
        self._remove_blocks_in_range(request_id, claim.kept, processed_computed_tokens // self.block_size)

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[tuple[list[Any], ...], int]:
        """Nothing: what a block holds does not follow from the text."""
        groups = kwargs["kv_cache_group_ids"] if "kv_cache_group_ids" in kwargs else args[2]
        return tuple([] for _ in groups), 0

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Nothing is cached, but here a manager is shown a request, and what it asks for."""
        if request.request_id in self.claims:
            return
        spec, text = self.kv_cache_spec, request.num_tokens
        options = RequestOptions.of(request.sampling_params.extra_args)
        budget, _ = options.within(spec.sizes)
        longest, chosen = request.num_prompt_tokens + request.max_tokens, num_tokens
        if not spec.needs:
            kept, text = cdiv(budget, self.block_size), 0
        elif options != RequestOptions():  # its shares are its own: the workers fit them into what all may keep
            kept, text = spec.kept(), 0
        elif text > budget:
            kept = spec.kept(text)
        elif spec.foreseen is None or longest <= budget:
            kept, text = spec.equal, 0
        else:
            text, chosen = budget + 1, spec.foreseen
            kept = max(spec.equal, spec.chosen(chosen))
        most = min(kept + 1, cdiv(longest, self.block_size))
        self.claims[request.request_id] = Claim(kept, most, text, chosen)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See `SingleTypeKVCacheManager`."""
        self.claims.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)  # type: ignore[no-any-return]


def register() -> None:
    """Make the spec known to vLLM."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictionSpec, EvictionManager, uniform_type_base_spec=EvictionSpec)
