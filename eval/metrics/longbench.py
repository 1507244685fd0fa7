"""Metrics of LongBench (arXiv 2308.14508) and LongBench v2 (arXiv 2412.15204), all but ROUGE and Chinese."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: typographic quotes and dashes stay
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_CHOICES = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))

_NOT_CODE = ("`", "#", "//")  # marks of Markdown and of comments


def first_line_of(prediction: str) -> str:
    """The first line that is not empty; a line of blanks counts as one.

    LongBench scores trec, triviaqa, samsum and lsht by it: their prompts are lists of examples, which a model goes on
    with after its answer.
    """
    return prediction.lstrip("\n").split("\n", 1)[0]


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words, 0 to 1, as in SQuAD; case, ASCII punctuation and articles do not count."""
    return f1(words_of(prediction), words_of(answer))


def f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall, repeated words counted; 0 without a common word, so for two empty bags."""
    common = (Counter(predicted) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def words_of(text: str) -> list[str]:
    """Words without case, ASCII punctuation and articles."""
    # In this order: "the." is an article, and "a-n" becomes one.
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 over the number of classes that the prediction names (letter by letter), 0 if the right one is not among them.

    Names that are part of the right one do not count against it. Like the official code, this removes them from the
    list that it iterates over, so that the name after each is skipped; that matters only if several names are nested.
    """
    named = [name for name in all_classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the answer, written the same; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def _retrieval(pattern: str, example: str) -> Callable[[str, str], float]:
    """`count`, for answers like the example; the function raises ValueError for an answer that is not like it."""

    def score(prediction: str, answer: str) -> float:
        match = re.search(pattern, answer)
        if match is None:
            raise ValueError(f"answer {answer!r} names no paragraph: an answer of this metric is like {example!r}")
        return count(prediction, match.group(1))

    return score


retrieval = _retrieval(r"Paragraph (\d+)", "Paragraph 7")
retrieval_zh = _retrieval(r"段落(\d+)", "段落7")


def code_sim(prediction: str, answer: str) -> float:
    """Similarity of the first line of code to the answer, in whole percent: `fuzzywuzzy.fuzz.ratio` without
    python-Levenshtein. Equal lines have 1, empty ones too."""
    return round(100 * SequenceMatcher(None, first_code_line(prediction), answer).ratio()) / 100


def first_code_line(prediction: str) -> str:
    """The first line that holds no mark of Markdown or of a comment, with its indentation; "" if there is none."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")


def multiple_choice(prediction: str, answer: str) -> float:
    """1 if the prediction says that the correct answer is this letter, else 0: "The correct answer is (B)", brackets
    optional, asterisks ignored."""
    text = prediction.replace("*", "")
    letter = next((match for choice in _CHOICES if (match := choice.search(text))), None)
    return float(letter is not None and letter.group(1) == answer)
