"""What a request finds in its pages when it is admitted."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..table.spans import Spans
from .contexts import ServedContext


@dataclass(frozen=True)
class Start:
    """Where a request begins.

    Attributes:
        prompt: its tokens.
        seen: tokens before the first one that it reads.
        read: tokens of its prompt among them.
        pages: that it needs.
        shared: pages of earlier requests among them, from the first on.
        context: a saved cache that comes before its prompt.
        spans: of its text, the context's tokens included, that are never evicted; the start of all texts is one.
    """

    prompt: list[int]
    seen: int
    read: int
    pages: int
    shared: Sequence[int]
    context: ServedContext | None
    spans: Spans
