"""Metrics of the generated tasks: the part of a prediction that looks like an answer, and the right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher


def _first_line(prediction: str) -> str:
    """Its first line with anything on it."""
    return prediction.strip().split("\n", 1)[0].strip()


def first(pattern: str) -> Callable[[str, str], float]:
    """1 if the first text of this pattern is the answer, else 0."""
    return lambda prediction, answer: float([answer] == re.findall(pattern, prediction)[:1])


def last_number(prediction: str, answer: str) -> float:
    """1 if the last number on the first line is the answer, else 0: a chain may be written out before it."""
    return float([answer] == re.findall(r"\d+", _first_line(prediction))[-1:])


def words_in_place(prediction: str, answer: str) -> float:
    """Share of the words of the answer that stand at their place."""
    wanted, words = answer.split(), re.findall(r"\w+", prediction)
    same = sum(a == b for a, b in zip(wanted, words))  # noqa: B905 - a short prediction loses words
    return same / len(wanted) if wanted else 0.0


def line_in_place(prediction: str, answer: str) -> float:
    """`words_in_place` of the first line."""
    return words_in_place(_first_line(prediction), answer)


def line_similarity(prediction: str, answer: str) -> float:
    """Edit similarity of the first line, as LongBench scores code."""
    return SequenceMatcher(None, answer, _first_line(prediction)).ratio()
