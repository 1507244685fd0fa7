"""Strings to be found in a prediction (RULER, Hsieh et al. 2024, arXiv 2404.06654)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that the prediction holds; case does not count."""
    return sum(_found(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction holds any of the answers, else 0; case does not count."""
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]
