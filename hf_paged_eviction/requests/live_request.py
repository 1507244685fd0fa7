"""A live request."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..queries.observer import Observer
from ..table.spans import Spans
from .layout import Layout, Shares

_LOGGER = logging.getLogger(__name__)


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
        observers: statistics of its queries, by layer; empty before the first, or if its policy needs none.
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
    observers: list[Observer] = field(default_factory=list)
    error: Exception | None = None

    @property
    def capacity(self) -> int:
        """Budget in tokens per layer, on average over its sets."""
        return self.shares.capacity

    @property
    def evicted(self) -> int:
        """Number of tokens evicted per layer."""
        return max(self.seen - self.capacity, 0)


def log_failure(request_id: str, doing: str, error: Exception) -> RuntimeError:
    """Log why a request failed. Returns an error whose text can be shown."""
    _LOGGER.error("Request %s failed while it was %s; the others go on.", request_id, doing, exc_info=error)
    try:
        reason = str(error) or type(error).__name__
    except Exception:  # of a class of somebody else's
        reason = type(error).__name__
    return RuntimeError(reason)


@contextmanager
def alone(request: LiveRequest, doing: str) -> Iterator[None]:
    """Context manager: an error is noted as that of the request, which ends after the forward, and not raised."""
    try:
        yield
    except Exception as error:
        if request.error is None:
            request.error = log_failure(request.id, doing, error)
