"""The state of a request when it is admitted."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..table.spans import Spans
from .contexts import ServedContext
from .shares import Shares


@dataclass(frozen=True)
class Start:
    """The start of a request.

    Attributes:
        prompt: tokens of the prompt.
        seen: number of tokens before the first one that it reads.
        read: number of tokens of its prompt among them.
        pages: number of pages that it needs.
        shares: division of its budget.
        context: a saved cache that comes before its prompt, or the context of an earlier prompt with the same
            beginning; None = none.
        spans: protected spans of its text, the context included; the start of the text is one of them.
        digests: digests of its prompt up to each cut, see `Prefixes`; empty if no other request may begin with it.
    """

    prompt: list[int]
    seen: int
    read: int
    pages: int
    shares: Shares
    context: ServedContext | None
    spans: Spans
    digests: Sequence[bytes]
