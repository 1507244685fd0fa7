"""A command of `paged-eviction` from its options."""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from ..errors import UserError
from ..options.base import Options, flag, plain_type, problem
from .brief import BriefCommand, show_all

O = TypeVar("O", bound=Options)  # noqa: E741


def add_command(app: typer.Typer, name: str, run: Callable[..., bool | None]) -> None:
    """Add a command.

    Args:
        run: called with the options, whose class is the type of its argument; if it returns False, the exit status is
            1. Its docstring is the help of the command. `EPILOG` of its module stands below the help, and `BRIEF`
            names the options that `--help` shows; `--help-all` shows all of them.
    """
    options = get_type_hints(run)["options"]

    def command(typer_context: typer.Context, **typed: Any) -> None:
        late = typed.pop("plugin")
        typed.pop("help_all")
        sources = {name: getattr(typer_context.get_parameter_source(name), "name", "DEFAULT") for name in typed}
        typed_values = {name: value for name, value in typed.items() if sources[name] != "DEFAULT"}
        with plain_errors():
            if late:  # they are loaded before the options of a command are read
                raise UserError(f"--plugin stands before the command: paged-eviction --plugin {late[0]} {name} ...")
            complete = run(read(options, typed_values))
        if complete is False:
            raise typer.Exit(1)

    keyword = inspect.Parameter.KEYWORD_ONLY
    brief = getattr(sys.modules[run.__module__], "BRIEF", {})
    parameters = [inspect.Parameter("typer_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for option, field in options.offered().items():
        default = inspect.Parameter.empty if field.is_required() else _default(field)
        panel = _COMMON if option in brief or not brief else _OTHERS
        annotation = _annotation(option, field, panel)
        parameters.append(inspect.Parameter(option, keyword, default=default, annotation=annotation))
    parameters.append(inspect.Parameter("plugin", keyword, default=None, annotation=LatePlugin))
    parameters.append(inspect.Parameter("help_all", keyword, default=False, annotation=HelpAll))
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    module = sys.modules[run.__module__]
    kind = type("Command", (BriefCommand,), {"brief": brief})
    app.command(name, cls=kind, epilog=getattr(module, "EPILOG", None))(command)


HelpAll = Annotated[bool, typer.Option("--help-all", is_eager=True, hidden=True, callback=show_all)]
#: What stands behind the command and belongs before it.
LatePlugin = Annotated[list[str] | None, typer.Option("--plugin", hidden=True)]


def read(options: type[O], typed: dict[str, Any]) -> O:
    """The options of a command line, and of the run file that it names.

    Raises:
        UserError: a value cannot be used.
    """
    if typed.get("config") is not None:
        from ..options.run_file import read_run_file

        typed = {**read_run_file(typed["config"], options), **typed}
    try:
        return options(**typed)
    except ValidationError as error:
        name, value, expected = problem(options, error)
        raise UserError(f"{flag(name)} {value!r}: {expected}") from error


#: The two groups of `--help-all`: what `--help` shows, and the rest.
_COMMON, _OTHERS = "Options", "More options"
#: Short, so that the names of options have room on 80 columns.
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _default(field: FieldInfo) -> Any:
    value = field.default
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value) if plain_type(field) is str and value is not None else value


def _annotation(name: str, field: FieldInfo, panel: str) -> Any:
    extra: Any = field.json_schema_extra
    kind = plain_type(field)
    optional = kind if field.default is not None or field.is_required() else kind | None
    if extra["argument"]:
        return Annotated[optional, typer.Argument(metavar=extra["metavar"], help=field.description)]
    names = [extra["flags"] or flag(name)] if kind is bool or extra["flags"] else []
    return Annotated[
        optional,
        typer.Option(
            *names,
            metavar=extra["metavar"] or _METAVARS.get(kind),
            min=extra["min"],
            help=field.description,
            rich_help_panel=panel,
            show_default=extra["shown"] or True,
        ),
    ]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show a mistake of the user without a traceback, exit status 2."""
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, OSError):  # met in many places, and asked for in none: `Path.is_file` raises it
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = str(error.filename)
            error = UserError(f"{name[:60]}...: the name is too long for a file ({len(name)} characters)")
        from ..running.processes.distributed import speaker

        who = speaker()
        if who is not None:
            text = f"{who}error: {error}"
            console = Console(stderr=True, soft_wrap=True)
            console.print(text, style="red", markup=False, highlight=False, emoji=False)  # "fold:x:" is no picture
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues where it was", err=True)
        raise typer.Exit(130) from None
