"""The reference of the command line, made of the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from inspect import cleandoc
from itertools import pairwise
from textwrap import dedent
from typing import Any

import typer

from hf_paged_eviction_eval.commands import GROUP, app

PROGRAM = "paged-eviction"
_STYLE = re.compile(r"(?<!\\)\[/?[a-z]*\]")  # [bold], [/]: markup of rich
_LAUNCHED = re.compile(rf"({PROGRAM}|accelerate|python) ")
#: A name and what it means.
_NAMED = re.compile(r"([a-z_]+): (.*)")


def sections(_: str) -> str:
    """A section for each command of this package: usage, options with defaults, examples."""
    group: Any = typer.main.get_command(app)
    others = {point.name for point in entry_points(group=GROUP) if point.dist.name != "hf_paged_eviction"}
    return "\n\n".join(_section(name, command) for name, command in group.commands.items() if name not in others)


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"{PROGRAM} {name}")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.hidden
    ]
    usage = [PROGRAM, name, *command.collect_usage_pieces(context)]
    parts = [f"## `{PROGRAM} {name}`", f"```text\n{' '.join(usage)}\n```"]
    parts.append(_prose(cleandoc(command.help or "")))
    if arguments:
        parts.append(_entries(arguments, context))
    for panel, members in _panels(options).items():
        parts += [f"**{panel}**", _entries(members, context)]
    parts += _examples(command.epilog)
    return "\n\n".join(part for part in parts if part)


def _panels(options: list[Any]) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    return panels


def _record(parameter: Any, context: Any) -> tuple[str, str]:
    """How it is written, and its help with the default in brackets, as the terminal would show them."""
    spelled, text = parameter.get_help_record(context)
    return spelled.split(" <list[")[0], text


def _entries(parameters: list[Any], context: Any) -> str:
    return "\n".join(_entry(*_record(parameter, context)) for parameter in parameters)


def _entry(spelled: str, text: str) -> str:
    """An item of a list."""
    match = re.fullmatch(r"(.*?)(?:  \[([^\[\]]*(?:\([^()]*\))?[^\[\]]*)\])?", text, re.DOTALL)
    assert match is not None
    facts = f" *{match[2].replace('default', 'Default', 1).replace('required', 'Required', 1)}.*" if match[2] else ""
    return f"- `{spelled}`: {_prose(match[1])}{facts}"


def _prose(text: str) -> str:
    """Without the terminal's markup; options as code."""
    plain = " ".join(_STYLE.sub("", text).replace("\\[", "[").split())
    return re.sub(r"(?<![\w`-])(--[a-z][a-z0-9-]*)", r"`\1`", plain.replace("[", "\\["))


def _examples(epilog: str | None) -> Iterator[str]:
    """Indented blocks are commands, code, or a name and its meaning; the others say what they do."""
    text = (epilog or "").replace("[bold]", "**").replace("[/]", "**")
    blocks = [block for block in text.split("\n\n") if block.strip()]
    for block, following in pairwise([*blocks, ""]):
        line = " ".join(block.split())
        if _LAUNCHED.match(line):
            yield f"```bash\n{line}\n```"
        elif block.startswith("  ") and (named := _NAMED.fullmatch(line)):
            yield f"- `{named[1]}`: {named[2]}"
        elif block.startswith("  "):
            yield f"```text\n{dedent(block).strip()}\n```"
        elif line.endswith((".", ":", "**")):
            yield line
        else:
            yield line + (":" if following.startswith("  ") else ".")
