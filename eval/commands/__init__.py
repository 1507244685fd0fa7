"""The commands of `paged-eviction`; needs the extra `eval`."""

from __future__ import annotations

from typing import Annotated

import typer

import hf_paged_eviction

from ..plugins import load_plugins
from .bench import register as add_bench
from .calibrate import register as add_calibrate
from .chat import register as add_chat
from .compress import register as add_compress
from .errors import plain_errors
from .evaluate import register as add_eval
from .fit_basis import register as add_fit_basis
from .fit_fold import register as add_fit_fold
from .fit_gate import register as add_fit_gate
from .lists import register as add_lists
from .recommend import register as add_recommend
from .report import register as add_report
from .score import register as add_score
from .serve import register as add_serve
from .verify import register as add_verify

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


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
    """What does a smaller KV cache cost? Accuracy, perplexity, time and memory of eviction policies at any budget."""
    with plain_errors():
        load_plugins(plugin or ())


for register in (
    add_eval,
    add_chat,
    add_score,
    add_recommend,
    add_report,
    add_verify,
    add_calibrate,
    add_fit_gate,
    add_fit_basis,
    add_fit_fold,
    add_compress,
    add_bench,
    add_serve,
    add_lists,
):
    register(app)

__all__ = ["app"]
