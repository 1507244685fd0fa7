"""F1 of English answers, as in SQuAD and LongBench."""

from __future__ import annotations

import re
import string

from .overlap import f1

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: typographic quotes and dashes stay
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words, 0 to 1; case, ASCII punctuation and articles do not count."""
    return f1(words_of(prediction), words_of(answer))


def words_of(text: str) -> list[str]:
    """Words without case, ASCII punctuation and articles."""
    # In this order: "the." is an article, and "a-n" becomes one.
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
