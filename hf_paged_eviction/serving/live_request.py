"""A live request."""

from dataclasses import dataclass

from ..table.spans import Spans
from .layout import Layout, Shares


@dataclass
class LiveRequest:
    """A live request.

    Attributes:
        id: its id.
        pages: number of blocks of the server's cache that it owns.
        shares: division of its budget.
        layout: sizes of its sets.
        spans: protected spans of its text, the start included.
        number: its row in all tensors; -1 = it waits.
        seen: number of tokens seen, those of the prepared step included.
        coded: number of these that have codes, where tokens are rounded; no step in preparation included.
        scored: whether only the newest blocks lack scores.
        error: why it failed in the present forward; None = it did not.
    """

    id: str
    pages: int
    shares: Shares
    layout: Layout
    spans: Spans
    number: int = -1
    seen: int = 0
    coded: int = 0
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
