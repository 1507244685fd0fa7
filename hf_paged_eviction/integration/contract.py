"""Whether an installed package has the parts that are used of it; private ones change between releases."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pydoc import ErrorDuringImport, locate
from typing import Any


def moved(package: str, used: Mapping[str, str]) -> list[str]:
    """Descriptions of what the installed package lacks; empty if nothing is missing.

    Args:
        used: by the path of a class or module in the package, its members: fields, attributes, and methods or functions
            with their parameters, `name(first,second)`. They may have more parameters if these are optional; with
            `...` at the end, in any order and with any others. `__init__` is the call of a class.
    """
    return [change for path, members in used.items() for change in _changes(package, path, members)]


def in_words(changes: list[str]) -> str:
    """The first of these changes, and how many more there are."""
    return f"{'; '.join(changes[:3])}{f'; and {len(changes) - 3} more' if len(changes) > 3 else ''}"


def _changes(package: str, path: str, members: str) -> list[str]:
    try:
        owner = locate(f"{package}.{path}")
    except ErrorDuringImport as error:
        return [f"{path} cannot be imported ({error})"]
    if owner is None:
        return [f"{path} is gone"]
    declared = {field.name for field in fields(owner)} if is_dataclass(owner) else set()
    changes = []
    for member in members.split():
        name, is_called, wanted = member.rstrip(")").partition("(")
        called: Any = getattr(owner, name, None)
        if called is None and name not in declared:
            changes.append(f"{path}.{name} is gone")
        elif is_called and not takes(called, wanted.split(",") if wanted else []):
            changes.append(f"{path}.{name} takes {inspect.signature(called)}, not ({wanted})")
    return changes


def takes(called: Callable[..., Any], wanted: list[str]) -> bool:
    """Whether a function or method has these parameters, see `moved`."""
    parameters = [value for name, value in inspect.signature(called).parameters.items() if name != "self"]
    names = [parameter.name for parameter in parameters]
    if wanted[-1:] == ["..."]:
        return set(wanted[:-1]) <= set(names)
    return names[: len(wanted)] == wanted and all(
        parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters[len(wanted) :]
    )
