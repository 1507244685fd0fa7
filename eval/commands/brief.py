"""`--help` of one screen, with `--help-all` behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand

#: Where a context notes that everything is to be shown.
_ALL = "hf_paged_eviction_eval.help_all"
#: Examples that the short help shows, each a sentence and a command.
_EXAMPLES = 3


class BriefCommand(TyperCommand):
    """A command whose `--help` shows what most people need.

    Class attributes:
        brief: what is said of the options that it shows, by name; empty: `--help` shows everything.
    """

    brief: Mapping[str, str] = {}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if self.brief and not ctx.meta.get(_ALL):
            _show(self, ctx, self.brief)
        else:
            super().format_help(ctx, formatter)


def show_all(ctx: Any, wanted: bool) -> None:
    """Print the whole help and stop."""
    if wanted:
        ctx.meta[_ALL] = True
        ctx.get_help()
        ctx.exit()


def _show(command: TyperCommand, ctx: Any, brief: Mapping[str, str]) -> None:
    console = Console(highlight=False)
    lines = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
    shown: dict[str | None, Any] = {parameter.name: parameter for parameter in command.params}
    for name, description in brief.items():
        option = shown[name]
        names = [] if option.param_type_name == "argument" else [option.opts[0]]
        spelled = " ".join([*names, *([option.metavar] if option.metavar else [])])
        lines.add_row(Text(f"  {spelled}", style="cyan"), Text(description))
    usage = " ".join(command.get_usage(ctx).split())
    console.print(Text(f"{usage}\n\n" + " ".join((command.help or "").split("\n\n")[0].split()) + "\n"))
    console.print(lines)
    others = sum(not entry.hidden for entry in shown.values() if entry.param_type_name == "option") - len(brief)
    console.print(Text(f"  --help-all  {others} more options, and all examples\n", style="cyan"))
    for line in _examples(command.epilog or ""):
        console.print(Text(line), soft_wrap=line.startswith(" "))  # a command can be copied


def _examples(epilog: str) -> list[str]:
    """The first ones: under a heading, sentences and commands by turns."""
    blocks = [" ".join(block.split()) for block in epilog.partition("[bold]Examples[/]")[2].split("\n\n")]
    blocks = [block for block in blocks if block]
    commands = [at for at, block in enumerate(blocks) if block.startswith("paged-eviction")]
    last = commands[:_EXAMPLES][-1] if commands else -1
    return [f"  {block}" if at in commands else block for at, block in enumerate(blocks[: last + 1])]
