"""Whether two answers to a problem of mathematics are the same, by the library `math-verify`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from .extra import import_extra

_SECONDS = 5


def math_verify(prediction: str, answer: str) -> float:
    """1 if the last boxed answer (else the last that can be read) equals the right one, as numbers or expressions.

    Raises:
        UserError: the library is not installed.
    """
    library: Any = import_extra("math_verify", "math", "scores of mathematics")
    # Its limit on time is an alarm, which only the main thread can set; elsewhere it warns that there is none.
    limit = _SECONDS if threading.current_thread() is threading.main_thread() else None
    logging.getLogger(library.__name__).setLevel(logging.ERROR)
    right = library.parse(f"\\boxed{{{answer}}}", parsing_timeout=limit)
    parsed = library.parse(prediction, parsing_timeout=limit)
    return float(library.verify(right, parsed, timeout_seconds=limit))
