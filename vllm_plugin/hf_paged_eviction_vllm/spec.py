"""The scheduler's side: how many blocks a request owns. Counts decide; nothing comes back from the workers."""

import copy
import logging
from dataclasses import dataclass, fields
from math import gcd
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hf_paged_eviction.internals import BlockBudget

from .metrics import counters
from .requests import REQUEST_ID, RequestOptions
from .snapshots import Beginnings, Snapshot, snapshots_of

logger = logging.getLogger("vllm.paged_eviction")


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
        snapshots: whether what a request holds when it ends is kept for those that begin like it.
    """

    sizes: BlockBudget
    unequal: bool
    part: float
    reserve: bool
    in_flight: int
    longest: int
    snapshots: bool

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
        # Requests with smaller budgets have other shares: where heads are divided, they keep as many blocks.
        tokens = self.sizes.capacity if budget is None or self.part > 1 else budget
        unused = self.block_size - gcd(self.sizes.block_size, self.block_size) if self.unequal else 0
        return int(cdiv(int(tokens * self.part) + unused, self.block_size))

    def most_blocks(self, tokens: int) -> int:
        """Largest number of blocks of a request with at most so many tokens, while a chunk is read included."""
        most: int = min(cdiv(tokens, self.block_size), self.kept() + 1 + cdiv(self.in_flight, self.block_size))
        return most

    @property
    def blocks_to_copy(self) -> int:
        """Blocks that a request needs at most, with the snapshot that it is copied from."""
        return 2 * (self.kept() + 1) + 1 + int(cdiv(min(self.in_flight, self.longest), self.block_size))

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
        budget: its budget in tokens.
        request: the request; None = vLLM has not shown it yet.
        usual: whether it has no options of its own.
        shared: number of its first tokens that are to become a snapshot, because others begin alike; 0 = none.
        singles_from: its tokens when it last brought several at once, but for few after a whole block: the workers can
            take back what came since.
    """

    kept: int
    most: int
    budget: int = 0
    request: Any = None
    usual: bool = False
    shared: int = 0
    singles_from: int = 0


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
        self._coming: dict[str, tuple[int, int]] = {}  # tokens with those of the step, and before
        self._counters = counters()
        self._beginnings = Beginnings()
        self.keeps_snapshots = kv_cache_spec.snapshots and self.block_pool.enable_caching
        blocks, least = self.block_pool.num_gpu_blocks - 1, kv_cache_spec.blocks_to_copy
        if self.keeps_snapshots and not hasattr(self, "_pending_cow_copies"):
            self.keeps_snapshots = False
            logger.warning("No snapshots: the installed vLLM copies no blocks for a request.")
        if self.keeps_snapshots and blocks < least:
            self.keeps_snapshots = False
            logger.warning("No snapshots: the pool has %d blocks, and a request with a copy needs %d.", blocks, least)

    def claim(self, request_id: str) -> Claim:
        """The claim of a request; if vLLM has not shown it yet, the largest one."""
        return self.claims.get(request_id) or self._claim(self.kv_cache_spec.kept(), self.kv_cache_spec.longest)

    def _longest(self, request: Any) -> int:
        """Most tokens of a request, as far as is known."""
        return int(request.num_prompt_tokens + request.max_tokens)

    def _claim(self, kept: int, longest: int) -> Claim:
        return Claim(kept, min(kept + 1, cdiv(min(longest, self.kv_cache_spec.longest), self.block_size)))

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
        spec, hit = self.kv_cache_spec, new_computed_blocks
        copied = self._get_num_evictable_blocks(hit)  # held beside their copies for a step
        if not apply_admission_cap:
            self._coming[request_id] = num_tokens, total_computed_tokens
            have, copies = len(self.req_to_blocks.get(request_id, ())), copied
            if hit:
                have, copies = total_computed_tokens // self.block_size, copied + len(hit)
            needed: int = max(cdiv(num_tokens, self.block_size) - have, 0) + copies
            if request_id in self.req_to_blocks or not spec.reserve:
                return needed
            # A new request, which --no-scheduler-reserve-full-isl admits without having asked for its whole text.
            return max(needed, self._to_admit(request_id, hit, copied))
        if not spec.reserve:
            most: int = spec.most_blocks(num_tokens) - self._owned(request_id) + copied
            return most
        return self._to_admit(request_id, hit, copied)

    def _to_admit(self, request_id: str, hit: Any, copied: int) -> int:
        """Blocks that must be free, so that neither this request nor those that live are ever short of any."""
        spec, others = self.kv_cache_spec, self.req_to_blocks.keys() - {request_id}
        still = sum(max(self.claim(other).most - self._owned(other), 0) for other in others)
        own = self.claim(request_id).most - self._owned(request_id) + bool(hit)
        chunk: int = cdiv(spec.in_flight, spec.block_size) if others else 0
        admitted: int = own + still + copied + chunk
        return admitted

    def _owned(self, request_id: str) -> int:
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See `SingleTypeKVCacheManager`."""
        kept, last = self.claim(request_id).kept, processed_computed_tokens // self.block_size
        before = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, kept, last)
        self._counters.add("blocks_freed", self.block_pool.get_num_free_blocks() - before)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The blocks of the longest snapshot whose text a request begins with. It will copy them."""
        if len(kv_cache_group_ids) == 1:
            size, known = block_pool.hash_block_size, snapshots_of(block_pool)
            for count in range(min(max_length // size, len(block_hashes)), 0, -1):
                snapshot = known.get(block_hashes[count - 1])
                if snapshot is not None and snapshot.is_whole:
                    return (list(snapshot.blocks),), count * size
        return tuple([] for _ in kv_cache_group_ids), 0

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Any, num_local_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Give a request its own copy of a snapshot. vLLM copies the blocks before the next forward."""
        sources, own = list(new_computed_blocks), self.req_to_blocks[request_id]
        count = num_local_computed_tokens // self.block_size
        kept = min(self.kv_cache_spec.kept(), count)
        if sources:
            self._counters.add("snapshot_hits", 1)
            self._counters.add("tokens_not_read_again", num_local_computed_tokens)
            self.block_pool.touch(sources)  # vLLM releases both ends of a copy once it is done
            copies = self.block_pool.get_new_blocks(len(sources))
            for place, (source, copy) in enumerate(zip(sources, copies, strict=True)):
                copy.ref_cnt += place < kept  # that of tokens that were overwritten later is held for a step only
                self._pending_cow_copies.append((source, copy))
            own.extend(copies[:kept])
            own.extend([self._null_block] * (count - kept))
            if count > kept:  # tells the workers whose state this is; freed as a block that is read
                self.block_pool.touch(sources[:1])
                own[-1] = sources[0]
        self.num_cached_block[request_id] = len(own)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Here a manager is shown a request, and what it asks for; blocks are cached when it ends."""
        claim = self.claims.get(request.request_id)
        if claim is None:
            given = request.sampling_params.extra_args
            options = RequestOptions.of(given)
            request.sampling_params = copy.copy(request.sampling_params)  # answers of one request may share it
            request.sampling_params.extra_args = {**(given or {}), REQUEST_ID: request.request_id}
            budget, _ = options.within(self.kv_cache_spec.sizes, request.request_id)
            claim = self._claim(self.kv_cache_spec.kept(budget), self._longest(request))
            claim.budget, claim.request, claim.usual = budget, request, options == RequestOptions()
            if claim.usual and self.keeps_snapshots:
                claim.shared = self.shared(request)
                self._beginnings.note(request.block_hashes[: request.num_prompt_tokens // self.block_size])
            self.claims[request.request_id] = claim
        elif request.resumable:  # its next part may have come
            claim.most = self._claim(claim.kept, self._longest(request)).most
        tokens, before = self._coming.get(request.request_id, (0, 0))  # not rounded, as `num_tokens` may be
        self._counters.add("tokens_evicted", max(tokens - claim.budget, 0) - max(before - claim.budget, 0))
        self._count_held()
        few = before == claim.singles_from and before % self.block_size == 0 and tokens - before < self.block_size
        if tokens - before > 1 and not (
            few and before > self.kv_cache_spec.sizes.capacity and not self.kv_cache_spec.unequal
        ):
            claim.singles_from = tokens

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See `SingleTypeKVCacheManager`."""
        claim = self.claims.pop(request_id, None)
        self._coming.pop(request_id, None)
        if claim is not None and claim.usual and self.keeps_snapshots:
            self._keep_snapshot(claim)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        self._count_held(leaving=sum(not block.is_null for block in blocks))
        return blocks

    def _keep_snapshot(self, claim: Claim) -> None:
        """Make what a request holds known, as of the last whole block of its text, or of a beginning.

        Its kept blocks, and the one in which the workers have saved what tokens since then have overwritten.
        """
        request, size, budget = claim.request, self.block_size, self.kv_cache_spec.sizes.capacity
        done = request.num_computed_tokens
        if request.is_finished():
            done -= request.num_in_flight_tokens
        elif not 0 < done == claim.shared:
            return
        count, blocks = done // size, self.req_to_blocks.get(request.request_id, [])
        if not 0 < count <= len(request.block_hashes):
            return
        if request.num_computed_tokens <= budget:
            held = blocks[:count]
        elif count > claim.kept and count * size >= claim.singles_from:
            held = blocks[: claim.kept] + blocks[count : count + 1]
        else:
            return
        known, text = snapshots_of(self.block_pool), request.block_hashes[count - 1]
        before = known.get(text)
        if any(block.is_null or block.block_hash is not None for block in held) or (before and before.is_whole):
            return
        known[text] = Snapshot.of(held, text, self.kv_cache_group_id, count * size, request.request_id, self.block_pool)
        self._counters.add("snapshots", 1)

    # ---- a beginning that many share ------------------------------------------------------------------------------

    def shared(self, request: Any) -> int:
        """Number of its first tokens with which an earlier request began, in whole blocks.

        0 = none, or there is a snapshot already.
        """
        size, spec, known = self.block_size, self.kv_cache_spec, snapshots_of(self.block_pool)
        if request.request_id in self.claims:
            return self.claims[request.request_id].shared
        count = self._beginnings.longest(request.block_hashes[: (request.num_prompt_tokens - 1) // size])
        if count <= spec.kept():  # as `_keep_snapshot`
            count = min(count, spec.sizes.capacity // size)
        snapshot = known.get(request.block_hashes[count - 1]) if count else None
        return 0 if snapshot is not None and snapshot.is_whole else count * size

    def is_beginning(self, request: Any) -> bool:
        """Whether a request has read just what others begin with, too, and blocks for a copy of it are left over.

        If it loses its blocks now, they are a snapshot, and it goes on from a copy.
        """
        claim, done = self.claims.get(request.request_id), request.num_computed_tokens
        if claim is None or not 0 < done == claim.shared or request.num_preemptions:
            return False
        chunk: int = cdiv(self.kv_cache_spec.in_flight, self.block_size)
        more = self._to_admit(request.request_id, (), 0) + self._owned(request.request_id) + chunk
        return bool(self.block_pool.get_num_free_blocks() > more)

    def _count_held(self, leaving: int = 0) -> None:
        pool = self.block_pool
        self._counters.put("blocks_held", pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - leaving)


def register() -> None:
    """Make the spec known to vLLM."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictionSpec, EvictionManager, uniform_type_base_spec=EvictionSpec)
