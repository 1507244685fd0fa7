"""A scheduler that cuts prompts at fixed lengths only."""

from collections import deque

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, Scheduler

from hf_paged_eviction.internals import log_failure

from .allocator import BatchedRequest, BoundedAllocator
from .failures import IsolatedRouter

_Batch = tuple[list[FutureRequestState] | None, bool, int, int]


class FixedCutScheduler(FIFOScheduler):  # type: ignore[misc]
    """Schedules requests first in, first out, and cuts every prompt after every `cut` tokens.

    transformers' scheduler cuts a prompt wherever the batch is full. Because tokens are evicted at a cut, an answer
    would then depend on the other requests. Here a chunk that does not fit waits for the next forward.

    Whatever is raised while a request is admitted or scheduled fails this request alone. If its pages cannot be given
    back, generation goes on with the others, and ends when these do not suffice.

    Attributes:
        bounded: allocator of the pages of layers that evict.
        batch: the requests of the present forward, in the order of their tokens.

    Args:
        stock: transformers' scheduler, which this one replaces.
        bounded: see above.
        vocabulary: number of token ids of the model.
        router: gets the results of requests that failed.
    """

    def __init__(self, stock: Scheduler, bounded: BoundedAllocator, vocabulary: int, router: IsolatedRouter) -> None:
        super().__init__(stock.cache, stock.safety_margin, stock.max_requests_per_batch)
        self._not_here_yet: set[str] = set()
        self.bounded, self._cut_at = bounded, bounded.options.prefill_chunk_size
        self._vocabulary, self._router = vocabulary, router
        self.batch: list[FutureRequestState] = []

    # ---- admission ------------------------------------------------------------------------------------------------

    def add_waiting_request(self, state: RequestState) -> None:
        """Queue a request.

        Raises:
            ValueError: the request would break its forward, and with it all other requests.
            RuntimeError: it cannot be told whether it would.
        """
        try:
            reason = self._why_refused(state)
        except Exception as error:  # transformers shows it, which may fail, too
            raise log_failure(state.request_id, "admitted", error) from None
        if reason is not None:
            raise ValueError(reason)
        super().add_waiting_request(state)
        if state.request_id in self._not_here_yet:
            self.set_request_cancellation(state.request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Remove cancelled requests, see `Scheduler.clear_cancelled_requests`.

        transformers looks for new requests and for cancellations at different moments. If a request and its
        cancellation come between the two, the request is removed in the next call.
        """
        with self._cancellation_lock:
            requests = self.active_requests.keys() | self.waiting_requests.keys()
            self._not_here_yet = self._requests_to_cancel - requests
        cleared: list[RequestState] = super().clear_cancelled_requests()
        return cleared

    def _why_refused(self, state: RequestState) -> str | None:
        tokens = state.initial_tokens
        if not tokens:
            return "The prompt is empty: a request needs at least one token."
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            return f"{wrong} is not a token of this model; its tokens are 0 to {self._vocabulary - 1}."
        if state.max_new_tokens is not None and state.max_new_tokens < 1:
            return f"max_new_tokens must be at least 1, got {state.max_new_tokens}."
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            return f"A request named {state.request_id!r} is already live. Choose another request_id."
        return None

    # ---- a batch --------------------------------------------------------------------------------------------------

    def schedule_batch(self, token_budget: int, cache_budget: int) -> _Batch:
        """Choose the requests of the next forward, see `Scheduler.schedule_batch`."""
        self.starved_requests: list[tuple[RequestState, int]] = []  # always empty, because pages are reserved
        for state in list(self.active_requests.values()):
            if (error := self.bounded.failure(state.request_id)) is not None:
                self.end(state, error)
        self._look_for_room()
        self.bounded.look_at_weights()
        self.batch = []
        self._left, self._read = token_budget, 0
        active = list(self.active_requests.values())
        answering = [state for state in active if state.status == RequestStatus.DECODING]
        reading = [state for state in active if state.status == RequestStatus.PREFILLING]
        waiting = deque(self._get_waiting_candidates())
        # One prompt first, so that its chunk finds room; then those that answer; then the other prompts.
        if not self._take_first(reading) and not reading:
            self._take_first(waiting)
        for state in (*answering, *reading):
            self._take(state)
        while self._take_first(waiting):  # in order of arrival
            pass
        while waiting and not self.active_requests:
            if self.bounded.lost:
                raise RuntimeError(f"{self.bounded.lost} pages could not be given back, and the others do not suffice.")
            self._fail(waiting.popleft(), MemoryError("even the empty cache has no room for it"))
            while self._take_first(waiting):
                pass
        self._cleanup_waiting_queue({future.state.request_id for future in self.batch})
        return self.batch, False, token_budget - self._left, self._read

    def _take_first(self, states: "list[RequestState] | deque[RequestState]") -> bool:
        """Take the first of these requests into the batch and out of the list; False if it does not fit."""
        if not states or not self._take(states[0]):
            return False
        del states[0]
        return True

    def _look_for_room(self) -> None:
        self._admits = self._try_to_meet_safety_margin() or not self.active_requests

    def _take(self, state: RequestState) -> bool:
        """Take the next tokens of a request into the batch; False if there is no room for them. One that fails is out
        of the way, too."""
        try:
            return self._add(state)
        except Exception as error:
            self._fail(state, error)
            return True

    def _fail(self, state: RequestState, error: Exception) -> None:
        self.end(state, log_failure(state.request_id, "scheduled", error))

    def end(self, state: RequestState, error: Exception) -> None:
        """End a request that failed, and free what it holds."""
        name = state.request_id
        self.waiting_requests.pop(name, None)
        self._cleanup_waiting_queue({name})  # also one that was admitted in this step
        self.finish_request(name)
        self._router.fail_and_deliver(state, error)
        self._look_for_room()

    def _add(self, state: RequestState) -> bool:
        request = self.bounded.prepare(state) if state.status == RequestStatus.PENDING else None
        count = self._next(state, request.read if request else 0)
        if count > self._left or len(self.batch) == self.max_requests_per_batch:
            return False
        if request is not None and not self._admit(state, request, count):
            return False
        allocators = self.cache.cache_allocators.values()
        read = max(allocator.get_seqlen_k(state.position_offset, count) for allocator in allocators) - count
        if state.status != RequestStatus.DECODING:
            rest = state.remaining_prefill_tokens
            state.tokens_to_process, state.remaining_prefill_tokens = rest[:count], rest[count:]
            state.status = RequestStatus.DECODING if count == len(rest) else RequestStatus.PREFILLING
        future = FutureRequestState(state, not state.remaining_prefill_tokens, {}, count)
        self.bounded.plan(state.request_id, count)  # nothing fails from here on, or others would get its tokens
        self._read += read
        self._left -= count
        self.batch.append(future)
        return True

    def _next(self, state: RequestState, skipped: int) -> int:
        """Number of tokens that the request brings next; `skipped` tokens of its prompt need not be read."""
        if state.status == RequestStatus.DECODING:
            return len(state.tokens_to_process)
        rest = len(state.remaining_prefill_tokens) - skipped
        return min(rest, self._cut_at - (len(state.initial_tokens) - rest) % self._cut_at)

    def _admit(self, state: RequestState, request: BatchedRequest, count: int) -> bool:
        if not (self._admits and self.bounded.has_room(request) and self.cache.can_store_request_tokens(state, count)):
            return False
        state.position_offset = request.seen
        state.remaining_prefill_tokens = state.remaining_prefill_tokens[request.read :]
        self.active_requests[state.request_id] = self.waiting_requests.pop(state.request_id)
        return True
