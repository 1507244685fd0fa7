"""The commands of `paged-eviction`; needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

import hf_paged_eviction

from ..caches.plugins import load_plugins
from . import bench, compress, evaluate, lists, plan, prepare, report, score, verify
from .brief import PlainGroup
from .command import add_command, plain_errors

app = typer.Typer(cls=PlainGroup, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(hf_paged_eviction.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="A module or .py file that registers policies, allocators or disposals of your own. Stands before the "
            "command, once for each module.",
        ),
    ] = None,
) -> None:
    """Measure what a smaller KV cache costs: accuracy, perplexity, time and memory, for any policy and budget."""
    with plain_errors():
        load_plugins(plugin or ())


#: In the order of `--help`.
COMMANDS: dict[str, Callable[..., bool | None]] = {
    "plan": plan.plan,
    "prepare": prepare.prepare,
    "eval": evaluate.evaluate,
    "score": score.score,
    "report": report.report,
    "verify": verify.verify,
    "compress": compress.compress,
    "bench": bench.bench,
}
#: Entry points of other packages, such as the lab.
GROUP = "hf_paged_eviction_eval.commands"
OTHERS = {point.name: point.load() for point in entry_points(group=GROUP)}
for name, run in (COMMANDS | OTHERS | {"tasks": lists.tasks, "policies": lists.policies}).items():
    add_command(app, name, run)

__all__ = ["GROUP", "app"]
