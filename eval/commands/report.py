"""`paged-eviction report`."""

from __future__ import annotations

from pathlib import Path

from ..options.base import Options, option

EPILOG = """[bold]Examples[/]

  paged-eviction report results/llama

  paged-eviction report results/paper/* --output report
"""


class ReportOptions(Options):
    """What was typed."""

    folders: list[Path] = option(..., "Result folders, one or many.", metavar="FOLDER...", argument=True)
    output: Path | None = option(None, "Folder of the report.", shown="report in the first result folder")


def report(options: ReportOptions) -> None:
    """Make one HTML page, plots and tables (Markdown, CSV, LaTeX) of the results of runs."""
    from ..report import run_report

    run_report(options.folders, options.output)
