"""Disposals by name."""

import inspect
from collections.abc import Callable
from typing import TypeVar

from ..policies.spelling import SpellingError, read
from .base import Disposal

DisposalClass = TypeVar("DisposalClass", bound=type[Disposal])

_DISPOSALS: dict[str, type[Disposal]] = {}


def register_disposal(name: str) -> Callable[[DisposalClass], DisposalClass]:
    """Class decorator: make a disposal available as `disposal="name"`.

    Raises:
        TypeError: the class is not a `Disposal`.
        ValueError: the name belongs to another class.
    """

    def register(cls: DisposalClass) -> DisposalClass:
        if not (isinstance(cls, type) and issubclass(cls, Disposal)):
            raise TypeError(f"@register_disposal({name!r}) needs a subclass of Disposal, got {cls!r}.")
        taken = _DISPOSALS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"The disposal name {name!r} is taken by {taken.__module__}.{taken.__qualname__}.")
        cls.name = name
        _DISPOSALS[name] = cls
        return cls

    return register


def available_disposals() -> tuple[str, ...]:
    """Names of all registered disposals, sorted."""
    return tuple(sorted(_DISPOSALS))


def make_disposal(disposal: str | Disposal) -> Disposal:
    """Return the disposal of that name or text; an object is returned as it is.

    Args:
        disposal: a name ("drop"), or a name with parameters in parentheses. An object's `label` is such a text.

    Raises:
        ValueError: no disposal has that name or parameter, a value is out of range, or the text is no disposal.
        TypeError: neither a text nor a disposal object.
    """
    if isinstance(disposal, Disposal):
        return disposal
    if not isinstance(disposal, str):
        raise TypeError(f"disposal must be a name or a Disposal object (not a class), got {disposal!r}.")
    text = disposal.strip()
    name = text.partition("(")[0].strip()
    cls = _DISPOSALS.get(name)
    if cls is None:
        raise ValueError(f"Unknown disposal {name!r}. Available: {', '.join(available_disposals())}.")
    spelling = read(text)
    known = list(inspect.signature(cls).parameters)
    for parameter in spelling.parameters:
        if parameter not in known:
            has = f"Its parameters: {', '.join(known)}" if known else "It has no parameters"
            raise SpellingError.at(text, spelling.column, f"{name} has no parameter {parameter}. {has}")
    if spelling.hosts:
        raise SpellingError.at(text, spelling.hosts[0].column, "parameters are given by name")
    return cls(**spelling.parameters)
