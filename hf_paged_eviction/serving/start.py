"""What a request finds in its pages when it is admitted."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..table.spans import Spans
from .contexts import ServedContext
from .shares import Shares


@dataclass(frozen=True)
class Start:
    """Where a request begins.

    Attributes:
        prompt: its tokens.
        seen: tokens before the first one that it reads.
        read: tokens of its prompt among them.
        pages: that it needs.
        shares: of its budget.
        context: what it begins with: a saved cache that comes before its prompt, or what an equal prompt has left.
        spans: of its text, the context's tokens included, that are never evicted; the start of all texts is one.
        digests: of its prompt up to each cut, see `Prefixes`; none where others may not begin with it.
    """

    prompt: list[int]
    seen: int
    read: int
    pages: int
    shares: Shares
    context: ServedContext | None
    spans: Spans
    digests: Sequence[bytes]
