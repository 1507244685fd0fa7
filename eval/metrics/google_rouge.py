"""ROUGE-L of Google's package `rouge_score`: another metric than the official one, for comparison with other work."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from .extra import import_extra


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of both texts, 0 to 1; case and all but ASCII letters and digits
    do not count, words are not stemmed.

    Raises:
        UserError: the package is not installed.
    """
    return float(_scorer(by_blanks=False).score(reference, prediction)["rougeL"].fmeasure)


def rouge_l_of_words(prediction: str, reference: str) -> float:
    """The same, of texts whose words stand between blanks: for scripts that the package's own rules would delete."""
    return float(_scorer(by_blanks=True).score(reference, prediction)["rougeL"].fmeasure)


@cache
def _scorer(*, by_blanks: bool) -> Any:
    scorer = import_extra("rouge_score.rouge_scorer", "metrics", "scores with rouge=rouge_score")
    # What the package calls a tokenizer is anything with this method.
    tokenizer = SimpleNamespace(tokenize=str.split) if by_blanks else None
    return scorer.RougeScorer(["rougeL"], use_stemmer=False, tokenizer=tokenizer)
