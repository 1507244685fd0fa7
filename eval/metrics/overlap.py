"""Overlap of two bags of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall, repeated words counted; 0 without a common word, so for two empty bags."""
    common = (Counter(predicted) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return (2 * precision * recall) / (precision + recall)
