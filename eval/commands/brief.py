"""`--help` of one screen, with `--help-all` behind it, in the one look that Typer gives both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from rich.console import Console
from rich.padding import Padding
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

#: Where a context notes that everything is to be shown.
_ALL = "hf_paged_eviction_eval.help_all"
#: Examples that the short help shows, each a sentence and a command.
_EXAMPLES = 2
#: How a command begins.
_LAUNCHED = tuple(f"  {program} " for program in ("paged-eviction", "accelerate", "python"))
_HEADING = "[bold]Examples[/]"


class PlainGroup(TyperGroup):
    """All commands: flags have no type beside them in `--help`."""

    def get_params(self, ctx: Any) -> Any:
        """Options, with the one of the help."""
        return plain_flags(super().get_params(ctx))


class BriefCommand(TyperCommand):
    """A command whose `--help` shows what most people need.

    Class attributes:
        brief: the description of each option that `--help` shows, by name; if it is empty, all are shown.
    """

    brief: Mapping[str, str] = {}

    def get_params(self, ctx: Any) -> Any:
        """Options, with the one of the help."""
        return plain_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown, blocks = copy(self), _blocks(self.epilog or "")
        shown.epilog = None  # which Typer would wrap: a command is to be copied in one piece
        # Typer would break lines where a docstring does.
        paragraphs = [" ".join(paragraph.split()) for paragraph in (self.help or "").split("\n\n")]
        if self.brief and not ctx.meta.get(_ALL):
            shown.params = list(_brief_parameters(self))
            paragraphs, blocks = paragraphs[:1], _first_examples(blocks)
        else:
            shown.params = [_narrow(_with_opposite(copy(parameter))) for parameter in self.params]
        shown.help = "\n\n".join(paragraphs)
        TyperCommand.format_help(shown, ctx, formatter)
        console = Console(highlight=False)
        for block in blocks:
            if block.startswith(_LAUNCHED):
                console.print(block, soft_wrap=True)
            else:
                console.print(Padding(block.strip(), (0, 1, 0, 2) if block.startswith("  ") else (1, 1, 0, 1)))


def plain_flags(parameters: Any) -> Any:
    """The parameters, with no type beside a flag: `--quick <bool>` looks as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def show_all(ctx: Any, wanted: bool) -> None:
    """Print the whole help and stop."""
    if wanted:
        ctx.meta[_ALL] = True
        ctx.get_help()
        ctx.exit()


def _brief_parameters(command: BriefCommand) -> Iterator[TyperOption | TyperArgument]:
    """In one panel, with what is said of them; last the option that shows everything."""
    by_name: dict[str | None, Any] = {parameter.name: parameter for parameter in command.params}
    for name, description in command.brief.items():
        parameter = copy(by_name[name])
        parameter.help, parameter.show_default, parameter.rich_help_panel = description, False, None
        if isinstance(parameter, TyperOption) and not parameter.is_flag:
            parameter.metavar = parameter.metavar or "NAME"  # choices would take columns from what is said
        yield _narrow(parameter)
    offered = [name for name, one in by_name.items() if isinstance(one, TyperOption) and not one.hidden]
    others = len(set(offered) - set(command.brief))
    everything = copy(by_name["help_all"])
    what = f"{others} more options" if others else "The same at length"
    everything.hidden, everything.help = False, f"{what}, and all examples."
    yield everything


def _with_opposite(parameter: Any) -> Any:
    """With the second name of a flag, which switches it off, in what is said."""
    if isinstance(parameter, TyperOption) and parameter.secondary_opts:
        parameter.help = f"{parameter.help} Otherwise {', '.join(parameter.secondary_opts)}."
    return parameter


def _narrow(parameter: Any) -> Any:
    """Without second names and ranges, which would take columns from what is said."""
    if isinstance(parameter, TyperOption):
        parameter.secondary_opts = []
        parameter.min = parameter.max = None
    return parameter


def _blocks(epilog: str) -> list[str]:
    """Headings and sentences; with two blanks in front, commands and what else is to stay as it is."""
    return [block for block in epilog.split("\n\n") if block.strip()]


def _first_examples(blocks: list[str]) -> list[str]:
    if _HEADING not in blocks:
        return []
    examples = blocks[blocks.index(_HEADING) :]
    commands = [at for at, block in enumerate(examples) if block.startswith("  paged-eviction")]
    return examples[: commands[:_EXAMPLES][-1] + 1] if commands else []
