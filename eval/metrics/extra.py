"""Packages that only some metrics need, and the metric that one of them is."""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from typing import Any

from ..errors import UserError

_SECONDS = 5


def import_extra(package: str, extra: str, purpose: str) -> Any:
    """The package, or an error that says how to install it.

    Args:
        package: name to import.
        extra: the extra of this distribution that brings it.
        purpose: what cannot be done without it, as the subject of a sentence.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba's source has escapes that newer Pythons warn of
            return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{purpose} need {package} ({error}): pip install 'hf_paged_eviction[{extra}]'") from error


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
