"""Counts of live requests and of what they hold."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RequestStats:
    """One live request.

    Attributes:
        request_id: the id that transformers gave it.
        seen: number of tokens that went through the model.
        held: number of tokens held per layer.
        evicted: number of tokens evicted per layer.
        pages: number of pages of transformers' cache that it owns, including reserved ones.
    """

    request_id: str
    seen: int
    held: int
    evicted: int
    pages: int


@dataclass(frozen=True)
class BatchingStats:
    """All requests, as of the last step.

    Attributes:
        requests: those that are live, in order of admission.
        waiting: requests that wait for pages.
        admitted: requests so far that were given pages.
        refused: requests so far that could not be served.
        evicted: tokens evicted per layer so far, of all requests, finished ones included.
        pages: blocks of the cache.
        pages_in_use: how many of them belong to requests.
        kept_bytes: bytes of the beginnings of prompts that are kept for later requests, in memory beside the pages.
        shared: tokens of prompts so far that were not read again, because an earlier request had read them.
        page_size: tokens per page.
        steps: forwards so far.
    """

    requests: tuple[RequestStats, ...] = ()
    waiting: int = 0
    admitted: int = 0
    refused: int = 0
    evicted: int = 0
    pages: int = 0
    pages_in_use: int = 0
    kept_bytes: int = 0
    shared: int = 0
    page_size: int = 0
    steps: int = 0

    @classmethod
    def of(cls, manager: Any) -> "BatchingStats":
        """The requests of a manager of `paged_batching`; nothing before it starts and after it stops."""
        scheduler = manager.scheduler
        if scheduler is None:
            return cls()
        bounded = scheduler.bounded
        # Copied at once, because the generation thread goes on.
        requests = tuple(
            RequestStats(name, request.seen, request.seen - request.evicted, request.evicted, request.pages)
            for name, request in bounded.requests.copy().items()
        )
        return cls(
            requests,
            waiting=len(scheduler.waiting_requests),
            admitted=bounded.admitted,
            refused=scheduler.refused,
            evicted=bounded.evicted + sum(request.evicted for request in requests),
            pages=bounded.num_blocks,
            pages_in_use=bounded.pages_in_use,
            kept_bytes=bounded.prefixes.bytes,
            shared=bounded.prefixes.hits,
            page_size=bounded.page_tokens,
            steps=bounded.steps,
        )

    @property
    def live(self) -> int:
        """Number of requests that own pages."""
        return len(self.requests)

    @property
    def held(self) -> int:
        """Tokens held per layer by all live requests."""
        return sum(request.held for request in self.requests)

    def __str__(self) -> str:
        return (
            f"{self.live} live, {self.waiting} waiting; {self.held} tokens held, {self.evicted} evicted; "
            f"{self.pages_in_use} of {self.pages} pages in use"
        )
