"""Disposals by name."""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar, cast

from ..naming import Kind, Registry
from .base import Disposal

DisposalClass = TypeVar("DisposalClass", bound=type[Disposal])

#: All of them.
DISPOSALS: Registry[Disposal] = Registry(
    Kind("disposal", "disposals", "recall(blocks=16)"),
    Disposal,  # type: ignore[type-abstract]
)


def register_disposal(name: str) -> Callable[[DisposalClass], DisposalClass]:
    """Class decorator: make a disposal available as `disposal="name"`.

    A package makes its disposals known without being imported by entry points of the group
    `hf_paged_eviction.disposals`.

    Raises:
        TypeError: the class is not a `Disposal`.
        ValueError: the name belongs to another class.
    """
    return DISPOSALS.register(name)


def available_disposals() -> tuple[str, ...]:
    """Names of all registered disposals, sorted."""
    return DISPOSALS.names()


def make_disposal(disposal: str | Disposal) -> Disposal:
    """Return the disposal of that name or text; an object is returned as it is.

    Args:
        disposal: a name ("drop"), a name with parameters in parentheses ("recall(blocks=16)"), or one with a file
            ("fold:F.safetensors"). An object's `label` is such a text.

    Raises:
        ValueError: no disposal has that name or parameter, a value is out of range, or the text is no disposal.
        TypeError: neither a text nor a disposal object.
    """
    if isinstance(disposal, str):
        name, _, file = disposal.strip().partition(":")
        found: Any = DISPOSALS.find(name) if name.isidentifier() else None
        if found is not None and "file" in signature(found).parameters:
            if not file:
                raise ValueError(f"The disposal {name} needs a file: write '{name}:FILE'.")
            return cast(Disposal, found(file))
    return DISPOSALS.make(disposal)
