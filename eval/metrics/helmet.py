"""Metrics of HELMET (Yen et al. 2024, arXiv 2410.02694) that need no model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .json_answer import json_answer
from .longbench import words_of

_CUTOFF = 10
_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")


def answer_within(prediction: str, answer: str) -> float:
    """1 if the words of the answer, run together as written, are part of the first line, else 0.

    Case, ASCII punctuation and articles do not count. The official script puts the word "Answer:", with which the
    prompt ended, before the prediction, so it does here.
    """
    said = f"Answer:{prediction.partition(chr(10))[0]}"
    return float(" ".join(words_of(answer)) in " ".join(words_of(said)))


def value_within(prediction: str, answer: str) -> float:
    """1 if the answer is part of the prediction, else 0; case, ASCII punctuation and articles do not count."""
    return float(" ".join(words_of(answer)) in " ".join(words_of(f"Corresponding value:{prediction}")))


def ndcg_10(prediction: str, answers: Sequence[str]) -> float:
    """Normalised discounted cumulative gain of the first ten documents of a ranking such as `3 > 1 > 2`, 0 to 1.

    The longest run of numbers in the first line is the ranking, of numbers of one length the first; a number that comes
    twice counts where it comes first. Rounded to five digits, as officially.

    Args:
        prediction: the text generated.
        answers: one, the relevance of each document as JSON: `{"3": 2, "1": 0}`.
    """
    relevance = json_answer("ndcg_10", answers, lambda value: type(value) is int, """'{"3": 2, "1": 0}'""")
    gains = [relevance.get(document, 0) for document in _ranking(prediction.partition("\n")[0])]
    best = _gain(sorted(relevance.values(), reverse=True))
    return round(_gain(gains) / best, 5) if best else 0.0


def _gain(relevance: Sequence[int]) -> float:
    first = enumerate(relevance[:_CUTOFF], 2)
    return sum(max(value, 0) / math.log2(rank) for rank, value in first)


def _ranking(text: str) -> list[str]:
    plain = re.sub(r"[\[\]:]", "", f"Ranking:{text}").lower().replace("id", "")
    longest = max((found.group() for found in _RANKING.finditer(plain)), key=len, default="")
    numbers = (number.strip() for number in longest.split(">"))
    return list(dict.fromkeys(number for number in numbers if number.isdigit()))
