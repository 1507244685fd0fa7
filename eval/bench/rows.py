"""The rows of a run, and what tells them apart."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..store.results import Row

DECODE, THROUGHPUT, PREFILL = "decode", "throughput", "prefill"
#: What became of a row: numbers, no such variant here, or an error.
MEASURED, UNAVAILABLE, FAILED = "measured", "unavailable", "failed"


class BenchKey(NamedTuple):
    """The identity of a row; a run that is continued skips the rows it finds."""

    kind: str
    variant: str
    context: int | None
    budget: int | None
    batch_size: int | None


def row_key(row: Row) -> BenchKey:
    """The identity of a finished row."""
    return BenchKey(*(row[name] for name in BenchKey._fields))


def make_row(key: BenchKey, status: str, reason: str | None = None, **numbers: Any) -> Row:
    """A row with its numbers, or with the reason why it has none."""
    return {**key._asdict(), "status": status, "reason": reason, **numbers}


def reason_of(error: Exception) -> str:
    """What went wrong, in one line that a table can hold."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text}"[:300]
