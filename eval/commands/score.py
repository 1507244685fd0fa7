"""`paged-eviction score`."""

from __future__ import annotations

from pathlib import Path

from ..options.base import Options, Words, option, words

EPILOG = """[bold]Examples[/]

  paged-eviction score results/llama

  paged-eviction score pred/llama3/*.jsonl

  paged-eviction score pred_e/llama3 --longbench-e --output scores.json

A published tree of several models, with files that hold several runs

  paged-eviction score pred_e --keep-first-run

LongBench v2

  paged-eviction score LongBench/results/*.jsonl

Answers of a run by other metrics

  paged-eviction score results/llama --metric qa_f1,rouge
"""
#: What `--help` says.
BRIEF = {
    "paths": "result folders; files or folders of LongBench's pred.py and of LongBench v2",
    "metric": "score by these metrics instead of those of the tasks",
    "longbench_e": "files of pred.py are LongBench-E",
    "keep_first_run": "count the first run only, in a file with several",
    "output": "also write the scores to this file",
}


class ScoreOptions(Options):
    """What was typed."""

    paths: list[Path] = option(
        ...,
        "Result folders of this package; files of LongBench's pred.py (TASK.jsonl), folders of them, or whole trees "
        "such as pred_e/; files of LongBench v2 (results/MODEL.jsonl).",
        metavar="FOLDER|FILE",
        argument=True,
    )
    longbench_e: bool = option(False, "Files of pred.py are LongBench-E: one score per length bucket.")
    keep_first_run: bool = option(
        False, "If a file has more lines than its task has samples (pred.py appends), count the first ones only."
    )
    metric: Words = option(
        "",
        "Score by these metrics of this package, instead of the metric of each task.",
        metavar="NAME,...",
        shown="the metric of each task",
    )
    output: Path | None = option(None, "Also write the scores to this file.", metavar="FILE.json")


def score(options: ScoreOptions) -> bool:
    """Score existing predictions, without a model. Exit status 1 if a file could not be scored."""
    from ..report.scoring import run_score

    return run_score(
        options.paths,
        options.output,
        metrics=words(options.metric),
        longbench_e=options.longbench_e,
        keep_first_run=options.keep_first_run,
    )
