"""`paged-eviction score`."""

from __future__ import annotations

from pathlib import Path

import typer

from ..options.base import option
from ..options.evaluate import MetricOptions
from .command import add_command

EPILOG = """[bold]Examples[/]

  paged-eviction score results/llama

  paged-eviction score pred/llama3/*.jsonl --rouge rouge_score

  paged-eviction score pred_e/llama3 --longbench-e --output scores.json
"""


class ScoreOptions(MetricOptions):
    """What was typed."""

    paths: list[Path] = option(
        ...,
        "Result folders of this package, or files (or folders of files) of LongBench's pred.py: TASK.jsonl.",
        metavar="FOLDER|FILE...",
        argument=True,
    )
    longbench_e: bool = option(False, "Files of pred.py are LongBench-E: one score per length bucket.")
    output: Path | None = option(None, "Write the scores here too, as JSON.", metavar="FILE.json")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "score", ScoreOptions, score, EPILOG)


def score(options: ScoreOptions) -> None:
    """Score predictions, or score them again, without a model."""
    from ..scoring import run_score

    run_score(options.paths, options.longbench_e, options.edit_similarity, options.rouge, options.output)
