"""`paged-eviction report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors

EPILOG = """[bold]Examples[/]

  paged-eviction report results/llama

  paged-eviction report results/paper/* --output report
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", epilog=EPILOG)(report)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Result folders, one or many.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the report.", show_default="report in the first result folder")
    ] = None,
) -> None:
    """Tables (Markdown, CSV, LaTeX), plots and one HTML page of everything that runs found."""
    with plain_errors():
        from ..report import run_report

        run_report(folders, output)
