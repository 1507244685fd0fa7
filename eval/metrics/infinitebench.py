"""The metrics of InfiniteBench (Zhang et al. 2024, arXiv 2402.13718), as its `compute_scores.py` gives them.

Each gives 0 (wrong) to 1 (right).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .chinese import NO_PUNCTUATION
from .extra import import_extra
from .overlap import f1

_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"\d+\.\d+|\d+")
#: Metrics that look at one answer; the others at all of a record.
OF_ONE = ("first_number", "word_match", "name_match", "last_number", "number_found")
_BLANKS = re.compile(r" {2,}")
_SENTENCE = "\n:\"'.,?!{}"


def first_number(prediction: str, answer: str) -> float:
    """The first digits in a row are the answer."""
    found = _DIGITS.search(prediction)
    return float(found is not None and found.group() == answer)


def word_match(prediction: str, answer: str) -> float:
    """The answer is one of the words."""
    return float(answer in _spaced(prediction, _SENTENCE).split())


def name_match(prediction: str, answer: str) -> float:
    """The name, in capitals, is one of the words."""
    return float(answer in _spaced(prediction, _SENTENCE).upper().split())


def last_number(prediction: str, answer: str) -> float:
    """The last word is the number."""
    words = _spaced(prediction, "\n.`'\":").split()
    return float(bool(words) and _whole(words[-1]) == int(answer))


def number_found(prediction: str, answer: str) -> float:
    """The first number is the answer; a whole one where the answer is whole."""
    found = _NUMBER.search(prediction)
    if found is None:
        return 0.0
    try:
        whole = int(answer)
    except ValueError:
        return float(float(found.group()) == float(answer))
    return float("." not in found.group() and _whole(found.group()) == whole)


def numbers_in_order(prediction: str, answers: Sequence[str]) -> float:
    """The share of numbers that are right before the first that is not. Signs do not count."""
    right = 0
    for said, answer in zip(_DIGITS.findall(prediction), answers, strict=False):
        if _whole(said) != int(answer):
            break
        right += 1
    return right / len(answers)


def letter_or_text(prediction: str, answers: Sequence[str]) -> float:
    """One of four options, by its letter or its text, which are the answers; several ways to say it count."""
    said = prediction.strip()
    if said[:1] in tuple("ABCD"):
        return float(said[0] in answers)
    if said in answers:
        return 1.0
    said = _BLANKS.sub(" ", _spaced(said, "\n\"'.,?!{}"))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        _, found, after = said.partition(prefix)
        if found:
            return float(len(after) > 0 and after[1:].startswith(tuple(answers)))
    # Officially a word counts as a letter if "ABCD" holds it: "AB" does.
    word = next((word for word in said.split() if word in "ABCD"), "")
    return float(word in answers)


def letter_or_function(prediction: str, answers: Sequence[str]) -> float:
    """A function by its name, the first answer, or by its letter, the second."""
    name, letter = answers
    said = prediction.strip()
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = _spaced(said, "\n`'\"-*")
    for word in ("Option", "option"):
        said = said.replace(word, " ")
    said = _BLANKS.sub(" ", said)
    for prefix in ("answer is:", "is:", "answer:", "correct option is:"):
        _, found, after = said.partition(prefix)
        if found:
            return float(len(after) > 0 and after[1:].startswith((letter, name)))
    return 0.0


def character_f1_zh(prediction: str, answers: Sequence[str]) -> float:
    """F1 of single characters, punctuation and blanks left out; the best over the answers."""
    return max(f1(_characters(prediction), _characters(answer)) for answer in answers)


def rouge_lsum(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-Lsum of Google's package, as `evaluate` calls it: without stemming, the best over the answers.

    Raises:
        UserError: the package is not installed.
    """
    scorer: Any = import_extra("rouge_score.rouge_scorer", "metrics", "scores of summaries of InfiniteBench")
    found = scorer.RougeScorer(["rougeLsum"], use_stemmer=False)
    return max(float(found.score(answer, prediction)["rougeLsum"].fmeasure) for answer in answers)


def _whole(digits: str) -> int | None:
    """The number; None for what is none, or for one of thousands of digits, which Python does not read."""
    try:
        return int(digits)
    except ValueError:
        return None


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(NO_PUNCTUATION).split()))


def _spaced(text: str, characters: str) -> str:
    """These characters become blanks."""
    return text.translate(dict.fromkeys(map(ord, characters), " "))
