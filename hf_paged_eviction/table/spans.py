"""Protected spans as the user gives them, such as instructions, a system prompt or the last question.

A span is `(start, end)`: the real tokens of a row from `start` up to but not including `end`. Positions count the real
tokens of the row from 0, so pads make no difference. A span may lie in text that is still to come.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from ..naming.sizes import shortened

Span = tuple[int, int]
#: The spans of one row: sorted, separate and not empty.
Spans = tuple[Span, ...]

#: No text has more tokens.
LONGEST = 1 << 48
_FORM = "{} must be a list of pairs (start, end), the same for all rows, or a list of such lists, one for each row"


def read_spans(spans: object, name: str = "protect") -> tuple[Spans, ...]:
    """Parse the spans that an argument gives; `name`: how messages call it.

    Returns:
        Spans by row; one entry for all rows; or an empty tuple.

    Raises:
        TypeError: the value has another form. ValueError: a span begins before 0, or ends before it begins.
    """
    if spans is None:
        return ()
    spans, form = read_protect(spans), _FORM.format(name)
    if not isinstance(spans, Sequence) or isinstance(spans, bytes):
        raise TypeError(f"{form}; got {spans!r}. `spans_of_roles` makes spans of messages.")
    if any(_is_span(entry) for entry in spans):
        return (merged(_span(entry, name) for entry in spans),)
    for row in spans:
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise TypeError(f"{form}; got {row!r} in it. `spans_of_roles` makes spans of messages.")
    rows = tuple(merged(_span(entry, name) for entry in row) for row in spans)
    return rows if any(rows) else ()


def read_protect(protect: Any) -> Any:
    """Parse a text of spans, "0:64,100:120", to pairs, or of roles, "system,last_user", to a list of words. (A command
    that knows the messages turns roles into spans.) Other values are returned unchanged.

    Raises:
        ValueError: the text is neither.
    """
    if not isinstance(protect, str):
        return protect
    words = [word.strip() for word in protect.split(",")]
    if all(word.isidentifier() for word in words):
        return words
    spans = [word.split(":") for word in words]
    if not all(len(span) == 2 and all(at.strip().isdecimal() for at in span) for span in spans):
        raise ValueError("write START:END,START:END in tokens, such as 0:64,100:120, or roles of messages: system")
    return [(int(start), int(end)) for start, end in spans]


def _is_span(entry: object) -> bool:
    return isinstance(entry, Sequence) and any(isinstance(bound, int) for bound in entry)


def _span(entry: object, name: str) -> Span:
    numbers = [bound for bound in entry if isinstance(bound, int)] if isinstance(entry, Sequence) else []
    if len(numbers) != 2 or len(cast(Sequence[object], entry)) != 2 or bool in map(type, numbers):
        raise TypeError(f"{_FORM.format(name)}; got {entry!r} in it.")
    start, end = numbers
    if not 0 <= start <= end <= LONGEST:
        raise ValueError(
            f"{name} has the span ({shortened(start)}, {shortened(end)}): give the index of its first token, counted "
            "from 0, and the index after its last token."
        )
    return start, end


def merged(spans: Iterable[Span]) -> Spans:
    """Sort spans, join those that touch, and drop empty ones."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)


def beginning(spans: Spans) -> int:
    """Number of tokens at the start of a text that these spans protect."""
    return spans[0][1] if spans and spans[0][0] == 0 else 0


def of_rows(spans: Sequence[Spans], rows: int, name: str = "protect=") -> list[Spans]:
    """Repeat spans to one entry per row; beams of a row follow each other. `name`: how messages call the spans.

    Raises:
        ValueError: the number of rows is not a multiple of the number of entries.
    """
    if not spans:
        return [()] * rows
    if rows % len(spans):
        raise ValueError(
            f"{name} has spans for {len(spans)} rows, which does not divide the batch of {rows}. Give one list "
            "of pairs for each row, or one list for all rows."
        )
    return [row_spans for row_spans in spans for _ in range(rows // len(spans))]


def blocks_of(spans: Spans, size: int) -> int:
    """Largest number of blocks of `size` tokens that spans can touch.

    A span at the start of the text begins a block. Another span may begin anywhere in a block, because earlier tokens
    were evicted: `n` tokens then touch up to `(n + size - 2) // size + 1` blocks. Tokens are divided into blocks again
    when a forward of several tokens overflows. If that happens inside a span, the span touches one block more. This is
    possible for one span only: the others are complete by then, or have not begun.
    """
    blocks = more = 0
    for start, end in spans:
        length = end - start
        if start == 0:
            blocks += -(-length // size)
        else:
            blocks += (length + size - 2) // size + 1
            more = more or int(size > 1 and length > 2)
    return blocks + more
