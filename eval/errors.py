"""Errors of the harness that the user can correct."""

import re
from textwrap import shorten

_SENTENCE_END = re.compile(r"(?<=\w)\.\s|\n\s*\n")


class UserError(Exception):
    """A mistake in what was asked for; the message says what to do, and is shown without a traceback."""


class RowsFailed(Exception):  # noqa: N818 (what happened, not a mistake of the program)
    """Some rows did not fit into memory, even alone; every other row of the job was yielded before this was raised.

    Attributes:
        keys: the rows that are missing.
        reason: what the allocator said.
    """

    def __init__(self, keys: tuple[tuple[object, ...], ...], reason: str) -> None:
        super().__init__(keys, reason)
        self.keys = keys
        self.reason = reason

    def __str__(self) -> str:
        return f"{len(self.keys)} rows ran out of memory one by one: {self.reason}"


def reason(error: Exception, sentences: int = 1) -> str:
    """What an error of another library begins with, on one line of at most 300 characters."""
    first = ". ".join(_SENTENCE_END.split(str(error).strip())[:sentences])
    text = shorten(first, 300, placeholder=" ...").rstrip(".:")
    # A KeyError holds nothing but the key.
    return text if " " in text else f"{type(error).__name__}: {text}".rstrip(": ")
