"""Answer an argument that does not exist with the one that was meant."""

import inspect
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def suggest_arguments(cls: T) -> T:
    """Class decorator: the error about an unknown keyword argument of the constructor names the closest one.

    Warnings about the line that calls the constructor have one more frame to pass.
    """
    init = vars(cls)["__init__"]
    names = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f"Did you mean {close[0]!r}?" if close else f"Its arguments: {', '.join(names)}."
                raise TypeError(f"{cls.__name__} has no argument {name!r}. {hint}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
