"""`paged-eviction score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors
from .options import EditSimilarity, Rouge

EPILOG = """[bold]Examples[/]

  paged-eviction score results/llama

  paged-eviction score pred/llama3/*.jsonl --rouge rouge_score

  paged-eviction score pred_e/llama3 --longbench-e --output scores.json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("score", epilog=EPILOG)(score)


def score(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE...",
            help="Result folders of this package, or files (or folders of files) of LongBench's pred.py: TASK.jsonl.",
        ),
    ],
    longbench_e: Annotated[
        bool, typer.Option("--longbench-e", help="Files of pred.py are LongBench-E: one score per length bucket.")
    ] = False,
    edit_similarity: Annotated[
        EditSimilarity, typer.Option(help="Of code tasks; difflib is official.")
    ] = EditSimilarity.difflib,
    rouge: Annotated[Rouge, typer.Option(help="Of summaries.")] = Rouge.official,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the scores here too, as JSON.")
    ] = None,
) -> None:
    """Score predictions, or score them again, without a model."""
    with plain_errors():
        from ..scoring import run_score

        run_score(paths, longbench_e, edit_similarity.value, rouge.value, output)
