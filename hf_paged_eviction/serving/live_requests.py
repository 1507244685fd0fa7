"""Live requests, and their rows in the tensors of the request table."""

from dataclasses import dataclass

from ..table.spans import Spans
from .layout import Layout
from .shares import Shares


@dataclass
class LiveRequest:
    """A live request.

    Attributes:
        id: its id.
        number: its row in all tensors.
        pages: blocks of transformers' cache that it owns.
        shares: division of its budget.
        layout: sizes of its sets.
        spans: protected spans of its text, the start included.
        seen: number of tokens seen, those of the prepared step included.
        scored: whether only the newest blocks lack scores.
        error: why it failed in the present forward; None = it did not.
    """

    id: str
    number: int
    pages: int
    shares: Shares
    layout: Layout
    spans: Spans
    seen: int = 0
    scored: bool = False
    error: Exception | None = None

    @property
    def capacity(self) -> int:
        """Budget in tokens per layer, on average over its sets."""
        return self.shares.capacity

    @property
    def evicted(self) -> int:
        """Number of tokens evicted per layer."""
        return max(self.seen - self.capacity, 0)


class LiveRequests:
    """The live requests by their id.

    Attributes:
        count: number of rows, in use or not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.taken: dict[str, LiveRequest] = {}
        self._free: list[int] = []

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self.taken[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.taken

    def take(self, request_id: str, pages: int, shares: Shares, layout: Layout, spans: Spans) -> LiveRequest:
        """Add a request and give it a row; `count` may grow."""
        if not self._free:
            self._free = list(range(2 * max(self.count, 4) - 1, self.count - 1, -1))
            self.count = 2 * max(self.count, 4)
        request = self.taken[request_id] = LiveRequest(request_id, self._free.pop(), pages, shares, layout, spans)
        return request

    def leave(self, request_id: str) -> LiveRequest | None:
        """Remove a request and return it; None if it had no row."""
        request = self.taken.pop(request_id, None)
        if request is not None:
            self._free.append(request.number)
        return request
