"""Refusing parameters that cannot be meant."""

import math
from typing import Any


def check_count(name: str, value: Any, at_least: int = 0) -> None:
    """Raise ValueError unless `value` is an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}.")


def check_between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is a finite number and `low <= value <= high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name} must be a number of at least {low:g}{upper}, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    check_between(name, value, 0)
    if value == 0:
        raise ValueError(f"{name} must be above 0, got {value!r}.")


def check_kernel(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is an odd int above 0, so that pooling has a middle."""
    check_count(name, value, at_least=1)
    if value % 2 == 0:
        raise ValueError(f"{name} must be odd, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
