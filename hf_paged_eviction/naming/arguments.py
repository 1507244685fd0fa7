"""Answer an argument that does not exist with the one that was meant."""

import inspect
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
#: What other caches and presses call what is said otherwise here, and how.
_ELSEWHERE = {
    "max_cache_len": "budget=, the tokens held per layer (StaticCache reserves a whole text)",
    "max_batch_size": "nothing: the number of rows is that of the first forward",
    "window_length": 'budget= and policy="streaming_llm"',
    "num_sink_tokens": "sink_tokens=",
    "compression_ratio": "budget=, which says what stays: compression_ratio=0.75 is budget='25%'",
    "press": "policy=",
}


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
                if name in _ELSEWHERE:
                    raise TypeError(
                        f"{cls.__name__} has no argument {name!r}. Here it is {_ELSEWHERE[name]}. See "
                        '"Comparison and migration", docs/comparison.md.'
                    )
                hint = f"Did you mean {close[0]!r}?" if close else f"Its arguments: {', '.join(names)}."
                raise TypeError(f"{cls.__name__} has no argument {name!r}. {hint}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
