"""`--config FILE`: what a run file says becomes the default of the options."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from ..errors import UserError
from ..run_file import read_run_file
from .errors import plain_errors

#: Options that are written with commas on the command line, and may be lists in a file.
LISTS = frozenset({"policies", "budgets", "tasks", "length"})
#: Options that are words on the command line, and may be numbers in a file.
NUMBERS = frozenset({"budgets", "length", "batch_size"})


def use_run_file(context: typer.Context, path: Path | None) -> Path | None:
    """Read the file before the other options are looked at."""
    if path is not None:
        with plain_errors():
            context.default_map = {**(context.default_map or {}), **options_of(path)}
    return path


def options_of(path: Path) -> dict[str, Any]:
    """The values in a run file, by parameter, as the command line would have them."""
    from .options import option_hints

    hints = option_hints()
    known = [name.replace("_", "-") for name in hints if name != "config"]
    found: dict[str, Any] = {}
    for key, value in read_run_file(path, known).items():
        name = key.replace("-", "_")
        problem = problem_with(name, value, hints[name])
        if problem is not None:
            raise UserError(f"{path}: {key}: {value!r} cannot be used: {problem}")
        found[name] = as_typed(name, value)
    return found


def problem_with(name: str, value: Any, hint: Any) -> str | None:
    """What is wrong with the type of a value; None if nothing is."""
    wanted = plain_type(hint)
    if name == "files":
        fine = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        return None if fine else "write a list of file names, such as [book.txt]"
    if name in LISTS and isinstance(value, list):
        fine = bool(value) and all(_is_word(name, each) for each in value)
        return None if fine else "write a list of names or numbers that is not empty"
    if wanted is bool:
        return None if isinstance(value, bool) else "write true or false"
    if wanted is int:
        least = getattr(get_args(hint)[1], "min", None)
        fine = isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
        return None if fine else "write a whole number" + ("" if least is None else f" from {least} up")
    if issubclass(wanted, Enum):
        names = [str(each.value) for each in wanted]
        return None if value in names else f"write {' or '.join(names)}"
    return None if _is_word(name, value) else "write a text, in quotes if it looks like something else"


def plain_type(hint: Any) -> type:
    """The type of an option without its annotation and without None."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    kinds = [kind for kind in get_args(inner) if kind is not NoneType] or [inner]
    return kinds[0] if isinstance(kinds[0], type) else list


def _is_word(name: str, value: Any) -> bool:
    return isinstance(value, str) or (name in NUMBERS and isinstance(value, int) and not isinstance(value, bool))


def as_typed(name: str, value: Any) -> Any:
    """The value as the command line would have it."""
    if name in LISTS and isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if name in NUMBERS else value
