"""Metrics of the generated tasks, and of RULER (Hsieh et al. 2024, arXiv 2404.06654): what a prediction holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

_CONTROL = re.compile(r"[\x00-\x1f]")


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


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that the prediction holds; case does not count."""
    return sum(_found(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction holds any of the answers, else 0; case does not count."""
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]
