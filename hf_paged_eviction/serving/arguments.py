"""The arguments of a request, by type, before they reach the thread that generates for all requests."""

from collections.abc import Sequence
from operator import index
from typing import Any

from .contexts import ServedContext
from .sampling import Sampler


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `BoundedManager.add_request` of a wrong type. None stands for an argument that is not given.

    Raises:
        TypeError: an argument has another type.
        ValueError: a text has a lone surrogate, so that it has no bytes.
    """
    for name in ("request_id", "salt"):
        _check_text(name, arguments.get(name))
    for name, kind in (("sampler", Sampler), ("context", ServedContext)):
        value = arguments.get(name)
        if not isinstance(value, kind | None):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}.")
    most, ends = arguments.get("max_new_tokens"), arguments.get("eos_token_id")
    if most is not None:
        _whole("max_new_tokens", most)
    for end in ends if isinstance(ends, Sequence | set | frozenset) else () if ends is None else (ends,):
        _whole("eos_token_id", end)


def token_ids(tokens: Any) -> list[int]:
    """The ids of a prompt as plain numbers.

    Raises:
        TypeError: one of them is not a whole number.
    """
    return [_whole("input_ids", token) for token in tokens]


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not valid Unicode: {value!r} has a lone surrogate.") from None


def _whole(name: str, number: Any) -> int:
    try:
        return index(number)
    except TypeError:
        kind = type(number).__name__
        raise TypeError(f"{name} must consist of whole numbers, got {number!r} of the type {kind}.") from None
