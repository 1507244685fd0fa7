"""`paged-eviction report`."""

from __future__ import annotations

from pathlib import Path

from ..options.base import Options, option


class ReportOptions(Options):
    """What was typed."""

    folders: list[Path] = option(..., "Result folders, one or many.", metavar="FOLDER")
    output: Path | None = option(None, "Folder of the report.", shown="report in the first result folder")


def report(options: ReportOptions) -> None:
    """Write tables (CSV), plots (SVG) and a page in Markdown that shows them, of one run or of several side by side.

    Examples:
      paged-eviction report results/llama
      paged-eviction report results/paper/* --output report
    """
    from ..report import run_report

    run_report(options.folders, options.output)
