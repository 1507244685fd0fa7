"""Metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import generated
from .chinese import qa_f1_zh
from .extra import math_verify
from .longbench import (
    EDIT_SIMILARITIES,
    classification,
    code_sim,
    count,
    longeval,
    multiple_choice,
    qa_f1,
    retrieval,
    retrieval_zh,
)
from .rouge import ROUGES, rouge, rouge_zh


@dataclass(frozen=True)
class _Case:
    prediction: str
    answers: Sequence[str]
    all_classes: Sequence[str]
    edit_similarity: str
    rouge: str


def _best(score: Callable[[str, str], float]) -> Callable[[_Case], float]:
    """The best score over the answers."""
    return lambda case: max(score(case.prediction, answer) for answer in case.answers)


def _of_all(score: Callable[[str, Sequence[str]], float]) -> Callable[[_Case], float]:
    """A score that takes all answers at once."""
    return lambda case: score(case.prediction, case.answers)


_SCORES: dict[str, Callable[[_Case], float]] = {
    "qa_f1": _best(qa_f1),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge": lambda case: _best(rouge(case.rouge))(case),
    "rouge_zh": lambda case: _best(rouge_zh(case.rouge))(case),
    "classification": lambda case: _best(
        lambda prediction, answer: classification(prediction, answer, case.all_classes)
    )(case),
    "count": _best(count),
    "retrieval": _best(retrieval),
    "retrieval_zh": _best(retrieval_zh),
    "code_sim": lambda case: _best(code_sim(case.edit_similarity))(case),
    "multiple_choice": _best(multiple_choice),
    "string_match_all": _of_all(generated.string_match_all),
    "string_match_part": _of_all(generated.string_match_part),
    "longeval": _best(longeval),
    "math_verify": _best(math_verify),
    "first_number": _best(generated.first(r"\d+")),
    "first_word": _best(generated.first(r"\w+")),
    "last_number": _best(generated.last_number),
    "words_in_place": _best(generated.words_in_place),
    "line_in_place": _best(generated.line_in_place),
    "line_similarity": _best(generated.line_similarity),
}

#: Names of all metrics: those of LongBench, of LongBench v2, of RULER, of LongEval, of mathematics, of generated tasks.
METRICS = tuple(_SCORES)


def score_sample(
    metric: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
    *,
    edit_similarity: str = "difflib",
    rouge: str = "official",
) -> float:
    """Score one prediction.

    The whole prediction is scored: tasks of which only the first line counts pass `first_line_of(prediction)`.

    Args:
        metric: one of `METRICS`.
        prediction: the text generated, as it is.
        answers: acceptable answers: the best score counts (`string_match_all`: all of them are to be found).
        all_classes: names of all classes; needed by `classification` only.
        edit_similarity: who compares lines of code, one of `EDIT_SIMILARITIES`.
        rouge: who computes ROUGE-L, one of `ROUGES`.

    Returns:
        0 (wrong) to 1 (right): LongBench's own score of this sample over 100.

    Raises:
        TypeError: the prediction is not a text, or answers or classes are not texts in a list.
        ValueError: a name is unknown, answers or classes are missing, or an answer cannot be one of this metric.
        UserError: a package is missing (Chinese metrics, and what is not the default); says which extra brings it.
    """
    _refuse_unknown("metric", metric, METRICS)
    _refuse_unknown("edit_similarity", edit_similarity, EDIT_SIMILARITIES)
    _refuse_unknown("rouge", rouge, ROUGES)
    if not isinstance(prediction, str):
        raise TypeError(f"the prediction is {_kind(prediction)}, not a text")
    _refuse_no_texts("answers", answers)
    if metric == "classification":
        if all_classes is None:
            raise ValueError("metric 'classification' needs all_classes: the names of all classes")
        _refuse_no_texts("all_classes", all_classes)
    return float(_SCORES[metric](_Case(prediction, answers, all_classes or (), edit_similarity, rouge)))


def _refuse_unknown(what: str, name: str, choices: Sequence[str]) -> None:
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(choices)}")


def _refuse_no_texts(what: str, texts: Any) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"{what} must be a list of texts, not {_kind(texts)}")
    if not texts:
        raise ValueError(f"{what} is empty: there is nothing to score against")
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise TypeError(f"{what} must be a list of texts, but holds {_kind(wrong[0])}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
