"""A command of `paged-eviction` from its options."""

from __future__ import annotations

import argparse
import errno
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from ..console import say
from ..errors import UserError
from ..options.base import Options, flag, nearest, plain_type, problem

O = TypeVar("O", bound=Options)  # noqa: E741
#: A function that runs a command. Its docstring is the help; its argument's type is the class of the options.
Command = Callable[[Any], bool | None]
#: Columns of the help on a wide terminal.
_WIDEST = 100
#: Short, so that the names of options have room on 80 columns.
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", list: "FILE"}


class Parser(argparse.ArgumentParser):
    """Mistakes are errors like those that the commands find themselves."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def run_command(name: str, run: Command, words: Sequence[str]) -> bool | None:
    """Run a command with what was typed; False if it could not do everything."""
    parser, options = parser_of(name, run), options_of(run)
    typed, unknown = parser.parse_known_args(words)
    if unknown:
        word = unknown[0].partition("=")[0]
        names = map(flag, options.offered())
        hint = nearest(word, names) if word.startswith("-") else f"see {parser.prog} --help"
        raise UserError(f"unknown {'option' if word.startswith('-') else 'argument'} {word}: {hint}")
    return run(read(options, vars(typed)))


def options_of(run: Command) -> type[Options]:
    """The class of the options of a command."""
    kind: type[Options] = get_type_hints(run)["options"]
    return kind


def parser_of(name: str, run: Command) -> Parser:
    """What reads the options of a command; it sets those that were typed."""
    width = min(shutil.get_terminal_size().columns, _WIDEST) - 2
    groups = options_of(run).groups()
    needed = [
        f"{_metavar(field)} ..." if _is_listed(field) else f"{flag(option)} {_metavar(field)}"
        for option, field in groups["options"].items()
        if field.is_required()
    ]
    parser = Parser(
        prog=f"paged-eviction {name}",
        usage=" ".join(["%(prog)s", *needed, "[options]"]),
        description=filled(inspect.getdoc(run) or "", width),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    for title, fields in groups.items():
        group = parser.add_argument_group(title)
        for option, field in fields.items():
            _add(group, option, field)
        if title == "options":
            group.add_argument("-h", "--help", action="help", help="Show this and stop.")
    return parser


def filled(text: str, width: int) -> str:
    """Paragraphs as wide as there is room; what is indented, such as an example, stays as it is."""
    return re.sub(r"^\S.*(\n\S.*)*", lambda paragraph: fill(paragraph[0], width), text, flags=re.MULTILINE)


def read(options: type[O], typed: dict[str, Any]) -> O:
    """The options of a command line, and of the run file that it names.

    Raises:
        UserError: a value cannot be used.
    """
    if typed.get("config") is not None:
        from ..options.run_file import read_run_file

        typed = {**read_run_file(Path(typed["config"]), options), **typed}
    try:
        return options(**typed)
    except ValidationError as error:
        name, value, expected = problem(options, error)
        raise UserError(f"{flag(name)} {value!r}: {expected}") from error


def _is_listed(field: FieldInfo) -> bool:
    return field.is_required() and plain_type(field) is list


def _metavar(field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    kind = plain_type(field)
    return extra["metavar"] or ("|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, ""))


def _add(group: Any, name: str, field: FieldInfo) -> None:
    extra: Any = field.json_schema_extra
    kind, about = plain_type(field), _about(field)
    if kind is bool:
        group.add_argument(flag(name), dest=name, action="store_true", help=about)
        if extra["off"]:
            group.add_argument(extra["off"], dest=name, action="store_false", help=f"Not {flag(name)}.")
        return
    how: dict[str, Any] = {"metavar": _metavar(field), "help": about}
    if kind is list:
        how |= {"nargs": extra["nargs"], "action": "extend"}
    if _is_listed(field):
        group.add_argument(name, **how)
    else:
        group.add_argument(flag(name), dest=name, required=field.is_required(), **how)


def _about(field: FieldInfo) -> str:
    """The help of an option, and its default."""
    extra: Any = field.json_schema_extra
    default = extra["shown"] or field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    has_default = not (field.is_required() or isinstance(default, bool) or default in (None, ""))
    text = f"{field.description} Default: {default}." if has_default else str(field.description)
    return text.replace("%", "%%")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show a mistake of the user without a traceback, exit status 2."""
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, OSError):  # met in many places, and asked for in none: `Path.is_file` raises it
            if error.errno != errno.ENAMETOOLONG:
                raise
            error = UserError(f"{str(error.filename)[:60]}...: the name is too long for a file")
        from ..running.processes.distributed import speaker

        who = speaker()
        if who is not None:
            say(Console(stderr=True, style="red"), f"{who}error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command continues where it was", file=sys.stderr)
        sys.exit(130)
