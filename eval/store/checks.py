"""What is expected of a row that is read."""

from __future__ import annotations

from collections.abc import Hashable
from math import isfinite
from typing import Any

from .results import Row

#: Position bins of a run over texts: enough for a curve, few enough to average over.
BINS = 16
_REAL = (int, float)
_NUMBERS = ("budget_tokens", "prompt_tokens", "record_length", "new_tokens", "repeated")
_MEASURED = ("efficiency", "agreement")
_OTHERS = {"prediction": str, "answers": list, "metadata": dict}


def row_key(row: Row) -> tuple[Hashable, ...]:
    """What tells rows apart, of tasks and of texts.

    Raises:
        KeyError: a field is absent that every version of this package writes.
        TypeError: a field is of another type.
    """
    _check(row, "budget_tokens", *_REAL, type(None))
    if "text" in row:
        return _text_key(row)
    _check(row, "score", *_REAL)
    if not isfinite(row["score"]):
        raise TypeError(f"score is {row['score']}")
    _check(row, "length", int, type(None))
    for name in ("task", "policy", "budget", "id"):
        _check(row, name, str)
    _check_optional(row)
    return row["length"], row["task"], row["policy"], row["budget"], row["id"]


def _text_key(row: Row) -> tuple[Hashable, ...]:
    for name in ("text", "policy", "budget"):
        _check(row, name, str)
    _check(row, "length", int)
    for name in ("loss", "count"):
        _check(row, name, list)
        # A loss that is no number, or infinite, is null.
        numbers = [value for value in row[name] if value is not None or name == "count"]
        if not all(isinstance(value, _REAL) and isfinite(value) for value in numbers):
            raise TypeError(f"{name} is {row[name]!r}")
    if len(row["loss"]) != len(row["count"]):
        raise TypeError("loss and count differ in length")
    if sum(row["count"]) <= 0:
        raise TypeError("no token was predicted")
    return "text", row["text"], row["policy"], row["budget"]


def _check_optional(row: Row) -> None:
    """Fields that older versions did not write; null is as good as absent."""
    for name in _NUMBERS:
        if row.get(name) is not None:
            _check(row, name, *_REAL)
    for name, kind in _OTHERS.items():
        if row.get(name) is not None:
            _check(row, name, kind)
    for rates in (row.get("hit_rate") or {}).values():
        if not all(rate is None or isinstance(rate, _REAL) for rate in rates):
            raise TypeError(f"hit_rate is {row['hit_rate']!r}")
    for name in _MEASURED:
        if row.get(name) is not None:
            _check(row, name, dict)
            for part, value in row[name].items():
                if value is not None and not isinstance(value, _REAL):
                    raise TypeError(f"{name}.{part} is {value!r}")


def _check(row: Row, name: str, *kinds: Any) -> None:
    if not isinstance(row[name], kinds):
        raise TypeError(f"{name} is {row[name]!r}")
