"""Classes named in a prediction."""

from __future__ import annotations

from collections.abc import Sequence


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 over the number of classes that the prediction names (letter by letter), 0 if the right one is not among them.

    Names that are part of the right one do not count against it. Taking them out of the list that is being walked
    passes over the name behind each, in the official code and so here: it matters only where several names are nested.
    """
    named = [name for name in all_classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0
