"""Metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import generated
from .chinese import qa_f1_zh
from .extra import math_verify
from .longbench import classification, code_sim, count, multiple_choice, qa_f1, retrieval, retrieval_zh
from .rouge import rouge_l, rouge_l_zh

#: The score of a prediction, given the answers and the names of all classes.
Score = Callable[[str, Sequence[str], Sequence[str]], float]


def _best(score: Callable[[str, str], float]) -> Score:
    """The best score over the answers."""
    return lambda prediction, answers, _: max(score(prediction, answer) for answer in answers)


def _of_all(score: Callable[[str, Sequence[str]], float]) -> Score:
    """A score that takes all answers at once."""
    return lambda prediction, answers, _: score(prediction, answers)


def _best_class(prediction: str, answers: Sequence[str], all_classes: Sequence[str]) -> float:
    return max(classification(prediction, answer, all_classes) for answer in answers)


_SCORES: dict[str, Score] = {
    "qa_f1": _best(qa_f1),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge": _best(rouge_l),
    "rouge_zh": _best(rouge_l_zh),
    "classification": _best_class,
    "count": _best(count),
    "retrieval": _best(retrieval),
    "retrieval_zh": _best(retrieval_zh),
    "code_sim": _best(code_sim),
    "multiple_choice": _best(multiple_choice),
    "contains": _of_all(generated.string_match_part),
    "string_match_all": _of_all(generated.string_match_all),
    "string_match_part": _of_all(generated.string_match_part),
    "math_verify": _best(math_verify),
    "first_number": _best(generated.first(r"\d+")),
    "first_word": _best(generated.first(r"\w+")),
    "last_number": _best(generated.last_number),
    "words_in_place": _best(generated.words_in_place),
    "line_in_place": _best(generated.line_in_place),
    "line_similarity": _best(generated.line_similarity),
}

#: Names of all metrics: of LongBench and LongBench v2, of own records, of RULER, of mathematics, of generated tasks.
METRICS = tuple(_SCORES)


def score_sample(
    metric: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
) -> float:
    """Score one prediction.

    The whole prediction is scored: tasks of which only the first line counts pass `first_line_of(prediction)`.

    Args:
        metric: one of `METRICS`.
        prediction: the text generated, as it is.
        answers: acceptable answers: the best score counts (`string_match_all`: all of them are to be found).
        all_classes: names of all classes; needed by `classification` only.

    Returns:
        0 (wrong) to 1 (right): LongBench's own score of this sample over 100.

    Raises:
        ValueError: the name is unknown, answers or classes are missing, or an answer cannot be one of this metric.
        UserError: a package is missing (Chinese metrics, mathematics); says which extra brings it.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; choose from {', '.join(METRICS)}")
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers is {answers!r}: it must be a list of texts, at least one")
    if metric == "classification" and (isinstance(all_classes, str) or not all_classes):
        raise ValueError("metric 'classification' needs all_classes: a list of the names of all classes")
    return float(_SCORES[metric](prediction, answers, all_classes or ()))
