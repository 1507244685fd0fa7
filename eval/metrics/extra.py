"""Packages that only some metrics need."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from ..errors import UserError


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
