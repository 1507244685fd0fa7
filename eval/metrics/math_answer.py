"""Whether two answers to a problem of mathematics are the same, by the library `math-verify`."""

from __future__ import annotations

from typing import Any

from .extra import import_extra


def math_verify(prediction: str, answer: str) -> float:
    """1 if the last boxed answer (else the last that can be read) equals the right one, as numbers or expressions.

    Raises:
        UserError: the library is not installed.
    """
    library: Any = import_extra("math_verify", "math", "scores of mathematics")
    right = library.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    said = library.parse(prediction, parsing_timeout=None)
    return float(library.verify(right, said, timeout_seconds=None))
