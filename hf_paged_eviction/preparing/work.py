"""The expected work of `prepare`, for its progress bar.

The unit is the time that one cache takes on one passage of text of 880 tokens; the numbers are measured on SmolLM2.
"""

from collections.abc import Sequence

from .candidates import BITS
from .passages import Passage

_WINDOW = 10.0
_PASSAGE, _QUESTION = 5.0, 0.4
_READING, _QUESTIONS = 1.0, 3.0
_FEW_BITS = 2.0


def of_window(share: float) -> float:
    """The work of fitting scores to a part of a window."""
    return _WINDOW * share


def of_passage(passage: Passage) -> float:
    """The work of reading a passage with the full cache."""
    return _PASSAGE + _QUESTION * len(passage.questions)


def of_reading(passage: Passage, few_bits: bool = False) -> float:
    """The work of one cache on one passage."""
    return (_QUESTIONS if passage.questions else _READING) * (_FEW_BITS if few_bits else 1.0)


def of_all(windows: int, passages: Sequence[Passage], first: int, candidates: int, stay: int, sizes: int) -> float:
    """The work of a whole measurement.

    Args:
        windows, candidates, stay: see `Effort`.
        passages: all of them; `first` of them decide which caches are tried on the others.
        sizes: shares of the memory at which bits are compared.
    """
    begin = [of_reading(passage) for passage in passages[:first]]
    end = [of_reading(passage) for passage in passages[first:]]
    bits = sum(of_reading(passage, few_bits=True) for passage in passages[:first]) * len(BITS) * sizes
    readings = sum(begin) * (candidates + stay + 4) + sum(end) * 2 * (stay + 1)
    return of_window(windows) + sum(map(of_passage, passages)) + readings + bits
