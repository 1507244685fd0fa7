"""The letter chosen (LongBench v2, Bai et al. 2024, arXiv 2412.15204)."""

from __future__ import annotations

import re

_CHOICES = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def multiple_choice(prediction: str, answer: str) -> float:
    """1 if the prediction says that the correct answer is this letter, else 0."""
    return float(chosen_letter(prediction) == answer)


def chosen_letter(prediction: str) -> str | None:
    """The letter A to D of "The correct answer is (B)", brackets optional, asterisks ignored; None without one."""
    text = prediction.replace("*", "")
    found = next((match for choice in _CHOICES if (match := choice.search(text))), None)
    return found.group(1) if found else None
