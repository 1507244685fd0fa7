"""What tells rows apart, and what is expected of a row that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from .results import Row

#: Position bins of a run over texts: enough for a curve, few enough to average over.
BINS = 16
Accepts = Callable[[Any], bool]


class RowKey(NamedTuple):
    """What a row is about; a run that is continued skips the rows it finds."""

    task: str
    length: int | None
    policy: str
    budget: str
    id: str


class TextKey(NamedTuple):
    """The same of a run over texts."""

    text: str
    policy: str
    budget: str


#: One of them.
Key = tuple[Any, ...]


def row_key(row: Row) -> Any:
    """What a row is about: a `RowKey`, or of texts a `TextKey`.

    Raises:
        KeyError: a field is absent that every version of this package writes.
        TypeError: a field is of another type.
    """
    if "text" in row:
        _check(row, _OF_TEXTS, {})
        if len(row["loss"]) != len(row["count"]):
            raise TypeError("loss and count differ in length")
        if sum(row["count"]) <= 0:
            raise TypeError("no token was predicted")
        return TextKey(*(row[name] for name in TextKey._fields))
    _check(row, _OF_TASKS, _MORE)
    for name in ("efficiency", "agreement"):
        for part, value in (row.get(name) or {}).items():
            if not _NUMBER_OR_NULL(value):
                raise TypeError(f"{name}.{part} is {value!r}")
    return RowKey(*(row[name] for name in RowKey._fields))


def _check(row: Row, required: Mapping[str, Accepts], optional: Mapping[str, Accepts]) -> None:
    """Of optional fields, null is as good as absent."""
    there = {name: row[name] for name in required}
    there |= {name: row[name] for name in optional if row.get(name) is not None}
    for name, value in there.items():
        if not {**required, **optional}[name](value):
            raise TypeError(f"{name} is {value!r}")


def _is(*kinds: type) -> Accepts:
    return lambda value: isinstance(value, kinds)


_NUMBER_OR_NULL = _is(int, float, type(None))


_OF_TASKS: dict[str, Accepts] = {
    "budget_tokens": _NUMBER_OR_NULL,
    **{"task": _is(str), "length": _is(int, type(None)), "policy": _is(str), "budget": _is(str), "id": _is(str)},
    "score": lambda value: isinstance(value, int | float) and isfinite(value),
}
#: What older versions did not write.
_MORE: dict[str, Accepts] = {
    **dict.fromkeys(("prompt_tokens", "record_length", "new_tokens", "repeated"), _is(int, float)),
    **{"prediction": _is(str), "answers": _is(list)},
    **dict.fromkeys(("metadata", "efficiency", "agreement"), _is(dict)),
}
_OF_TEXTS: dict[str, Accepts] = {
    "budget_tokens": _NUMBER_OR_NULL,
    **{"text": _is(str), "policy": _is(str), "budget": _is(str), "length": _is(int)},
    # A loss that is no number, or infinite, is null in a file.
    "loss": lambda value: isinstance(value, list) and all(map(_NUMBER_OR_NULL, value)),
    "count": lambda value: isinstance(value, list) and all(map(_is(int), value)),
}
