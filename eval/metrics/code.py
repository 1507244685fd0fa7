"""The next line of code, compared letter by letter."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher

from .extra import import_extra

#: Who compares lines: the standard library, as the official scores do, or rapidfuzz, as they do where
#: python-Levenshtein happens to be installed.
EDIT_SIMILARITIES = ("difflib", "rapidfuzz")

_NOT_CODE = ("`", "#", "//")  # marks of Markdown and of comments


def code_sim(edit_similarity: str) -> Callable[[str, str], float]:
    """The function of (prediction, answer): similarity of the first line of code to the answer, in whole percent.

    Args:
        edit_similarity: one of `EDIT_SIMILARITIES`.
    """
    percent = _rapidfuzz_percent if edit_similarity == "rapidfuzz" else difflib_percent
    return lambda prediction, answer: percent(first_code_line(prediction), answer) / 100


def first_code_line(prediction: str) -> str:
    """The first line that holds no mark of Markdown or of a comment, with its indentation; "" if there is none."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")


def difflib_percent(line: str, answer: str) -> int:
    """`fuzzywuzzy.fuzz.ratio` without python-Levenshtein, 0 to 100; equal lines have 100, empty ones too."""
    return round(100 * SequenceMatcher(None, line, answer).ratio())


def _rapidfuzz_percent(line: str, answer: str) -> int:
    fuzz = import_extra("rapidfuzz.fuzz", "metrics", "scores with edit_similarity=rapidfuzz")
    return int(round(fuzz.ratio(line, answer)))  # noqa: RUF046 - its type is not known here
