"""A haystack of running text, word by word, and where its sentences end."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from . import haystack


def words(rng: random.Random) -> Iterator[str]:
    """Endless words of the filler text: made-up sentences and lines of the standard library in turns."""
    for line in haystack.stream(rng):
        yield from line.split()


def split_sentences(text: str) -> list[str]:
    """Sentences without the space between them: a sentence ends with `.`, `!` or `?` before a space."""
    return re.split(r"(?<=[.!?]) ", text) if text else []
