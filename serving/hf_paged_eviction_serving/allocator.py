"""Allocates the pages of the layers that evict, when a request is admitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.requests import RequestState

from hf_paged_eviction.internals import FewBits, Layout, LiveRequest, RequestTable, Shares, Spans, log_failure

from .attention import hand_over
from .coded_pages import CodedPages
from .contexts import ServedContext
from .contract import ALLOCATOR, check_attributes
from .options import ServingOptions
from .prefixes import Prefixes
from .stock_pages import StockPages
from .stock_step import StockStep
from .weights import Weights


@dataclass
class BatchedRequest(LiveRequest):
    """A request of continuous batching.

    Attributes:
        prompt: tokens of the prompt.
        context: a saved cache that comes before its prompt, or the context of an earlier prompt with the same
            beginning; None = none.
        read: number of tokens of its prompt in this context.
        digests: digests of its prompt up to each cut, see `Prefixes`; empty if no other request may begin with it.
        weights: those that were active when it was prepared, see `Weights.key`.
    """

    prompt: Sequence[int] = ()
    context: ServedContext | None = None
    read: int = 0
    digests: Sequence[bytes] = ()
    weights: str = ""


class BoundedAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Takes all pages of a request at its first token, so that no request is preempted.

    It replaces transformers' own allocator for full-attention layers in the cache, on the same memory.

    Attributes:
        requests: the live requests by their id.
        request_table: their positions, scores and victims.
        prefixes: contexts of earlier prompts.
        page_tokens: number of tokens of each layer in a page.
        lost: number of pages that could not be given back.

    Args:
        cache: transformers' paged cache. It must not have served any request.
        options: budget and policy of each request.
        share: whether requests may begin with contexts of earlier ones.
        weights: tells which weights have read what is stored.

    Raises:
        ValueError: transformers takes other layers for full-attention layers than this package does.
    """

    supports_block_sharing = False
    supports_block_table = False

    def __init__(self, cache: PagedAttentionCache, options: ServingOptions, share: bool, weights: Weights) -> None:
        stock = cache.cache_allocators[self.layer_type]
        check_attributes(stock, ALLOCATOR)
        if set(stock.layer_indices) != set(options.layers):
            raise ValueError(
                f"Layers {sorted(options.layers)} of this {cache.config.model_type} model can evict, but continuous "
                f"batching takes {sorted(stock.layer_indices)} for full-attention layers. Use PagedEvictionCache with "
                "generate."
            )
        super().__init__(
            index=stock.index,
            layer_indices=stock.layer_indices,
            num_key_value_heads=stock.num_key_value_heads,
            config=cache.config,
            cache_dtype=cache.dtype,
            page_size=stock.tokens_per_page,
            allow_block_sharing=False,
        )
        memory = cache.num_sectors * cache.bytes_per_sector
        self.register_cache_tensor(cache.bytes_per_sector, memory, cache.cache_tensor, cache.pool)
        states, _ = self._kv_token_views[self.layer_indices[0]]  # from the first row of all pages on
        layers = [options.layers[layer] for layer in self.layer_indices]
        sets = stock.num_key_value_heads if options.separate else 1
        coders = [layer.store.coder for layer in layers if isinstance(layer.store.coder, FewBits)]
        size = self.tokens_per_page
        self._pages = (
            CodedPages(coders, states, sets, options.budget, size)
            if coders
            else StockPages(states, len(layers), sets, options.budget, size)
        )
        self.page_tokens = self._pages.page_tokens
        self.options, self.requests = options, dict[str, BatchedRequest]()
        self.request_table = RequestTable(options.sizes, layers, self._pages, sets)
        self._rows, self._free_rows = 0, list[int]()
        self.lost = 0
        self._prepared: dict[str, BatchedRequest] = {}
        # Where other layers hold tokens, too, a prompt has to be read for those.
        shares = share and len(cache.cache_allocators) == 1
        self.prefixes = Prefixes(options.prefill_chunk_size, options.prefix_bytes if shares else 0)
        self._weights, self._changes, self._key = weights, weights.changes, ""
        self._step, self._planned = self._new_step(), set[str]()
        self._place = {layer: at for at, layer in enumerate(self.layer_indices)}
        # From here on, this is the allocator of the cache.
        cache.cache_allocators[self.layer_type] = self
        cache.layer_to_allocator.update(dict.fromkeys(self.layer_indices, self))
        cache.use_prefix_sharing, cache.max_decode_fast_path_length = False, 0
        if cache.read_cache_limit is None:
            cache.read_cache_limit = options.budget

    # ---- pages ----------------------------------------------------------------------------------------------------

    def look_at_weights(self) -> None:
        """Note which weights compute the next forward, and drop what others have read."""
        self._key = self._weights.key()
        if self._weights.changes != self._changes:
            self._changes = self._weights.changes
            self.prefixes.clear()

    def prepare(self, state: RequestState) -> BatchedRequest:
        """Prepare a waiting request; `allocate_cache_to_request` uses it when the request is admitted."""
        kwargs, prompt = state.logit_processor_kwargs, state.initial_tokens
        brought, budget = kwargs.get("context"), kwargs.get("budget")
        spans = self.options.spans_of(kwargs.get("protect"), budget, brought)
        request = self._prepared[state.request_id] = self._request(state.request_id, budget, spans)
        if brought is not None and brought.weights != self._key:
            raise ValueError(
                "The weights or the active adapters have changed since this context was made, so it was read by "
                "others. Read it again, and make a new one with batching.context."
            )
        request.weights = self._key
        salt = f"{self._key} {kwargs.get('salt') or ''} {request.capacity} {request.shares.least(spans)}"
        request.prompt, request.digests = prompt, () if brought else self.prefixes.digests(prompt, spans, salt)
        prefix = self.prefixes.match(request.digests, len(prompt) - 1)
        request.context, request.read = brought or prefix, 0 if prefix is None else prefix.seen
        if state.max_new_tokens is not None:
            begins = request.read if brought is None else brought.seen
            most = begins + len(prompt) - request.read + state.max_new_tokens
            request.pages = self.options.pages(self.page_tokens, most, budget)
        return request

    def _request(self, request_id: str, budget: int | None, spans: Spans) -> BatchedRequest:
        table, options = self.request_table, self.options
        shares = Shares(options.allocator, options.sizes_of(budget), table.layers, table.sets)
        layout = Layout.equal(table.layers * table.sets, shares.capacity)
        return BatchedRequest(request_id, options.pages(self.page_tokens, None, budget), shares, layout, spans)

    def has_room(self, request: BatchedRequest) -> bool:
        """Whether there are enough free pages for a request."""
        taken = sum(live.pages for live in self.requests.values())
        return request.pages + taken + self.lost <= int(self.num_blocks)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Number of pages to take now: all for a new request, none later."""
        if request_id in self.requests:
            return 0
        if request_id not in self._prepared:  # tokens that no scheduler chose, to warm up
            self._prepared[request_id] = self._request(request_id, None, self.options.spans_of())
        return self._prepared[request_id].pages

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Take the pages of a new request, and a row."""
        if request_id in self.requests:
            return
        count = self.needs_new_blocks(request_id, past_length, query_length)
        request, table = self._prepared.pop(request_id), self.request_table
        blocks = self.block_table[request_id] = self.pool.get_free_blocks(self.index, count)
        if not self._free_rows:
            more = 2 * max(self._rows, 4)
            self._free_rows, self._rows = [*range(more - 1, self._rows - 1, -1)], more
        request.number = self._free_rows.pop()
        self.requests[request_id] = request
        self._pages.reserve(
            request.number, self._rows, [block * self.block_physical_stride for block in blocks], request.capacity
        )
        table.add(request, self._rows)
        if request.context is not None:
            request.context.begin(request, table, self._pages)
            self.prefixes.hits += request.read

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Give back the pages of a request, and its row. Pages that cannot be given back are `lost`."""
        blocks = self.block_table.pop(request_id, [])
        self._prepared.pop(request_id, None)
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._free_rows.append(request.number)
        try:
            self.pool.free_blocks(self.index, blocks)
            blocks = []
        except Exception as error:
            log_failure(request_id, "freed", error)
            self.lost += len(blocks)

    def free_all_requests(self) -> None:
        """Give back the pages of all requests, also those of a failed forward."""
        super().free_all_requests()
        self._prepared.clear()
        self._step, self._planned = self._new_step(), set()

    @property
    def pages_in_use(self) -> int:
        """Number of pages that belong to requests."""
        return sum(map(len, self.block_table.copy().values()))

    # ---- a forward ------------------------------------------------------------------------------------------------

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Largest number of tokens that the queries of a request attend to."""
        held, budget = min(past_length, self.options.budget), self.options.budget
        return held if query_length == 1 and held == budget else held + query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Empty, because the slots to read are known only when the forward runs."""
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Empty, because every layer writes to other slots."""
        if self._step.begun or request_id not in self._planned:  # tokens that no scheduler chose, to warm up
            self.plan(request_id, query_length)
        return []

    def plan(self, request_id: str, count: int) -> None:
        """Add the next `count` tokens of a request to the next forward; if that fails, the forward is as before."""
        if self._step.begun:
            self._step, self._planned = self._new_step(), set()
        request = self.requests[request_id]
        self._keep_prefix(request)
        self._step.add(request, count)
        self._planned.add(request_id)

    def failure(self, request_id: str) -> Exception | None:
        """Why a request failed in the present forward; None = it did not."""
        request = self.requests.get(request_id)
        return None if request is None else request.error

    def _keep_prefix(self, request: BatchedRequest) -> None:
        """Forwards so far have written what the request has seen: keep it, where others may begin with it."""
        if request.weights != self._key:
            request.digests = ()  # read in part by these and in part by others
        number, beyond = divmod(request.seen, self.prefixes.cut)
        if beyond or not request.read < request.seen <= len(request.prompt) or number > len(request.digests):
            return
        digest = request.digests[number - 1]
        if self.prefixes.wants(digest, number == len(request.digests)):
            self.prefixes.keep(digest, ServedContext.held_by(request, self.request_table, self._pages))

    def _new_step(self) -> StockStep:
        return StockStep(self.request_table, self._pages)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take in the new tokens of a layer; attention must follow.

        Args:
            key_states, value_states: `[new, kv_heads, dim]`, all requests of the forward one after the other.

        Returns:
            The arguments. Attention reads the other tokens that the queries see.
        """
        if not self._step.begun:
            self._step.begin()
        hand_over(layer_idx, partial(self._step.attend, self._place[layer_idx], key_states, value_states))
        return key_states, value_states
