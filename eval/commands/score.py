"""`paged-eviction score`."""

from __future__ import annotations

from pathlib import Path

from ..options.base import Options, Words, option, words


class ScoreOptions(Options):
    """What was typed."""

    paths: list[Path] = option(
        ...,
        "Result folders; files of LongBench's pred.py (TASK.jsonl), folders of them, or whole trees such as pred_e/; "
        "files of LongBench v2 (results/MODEL.jsonl).",
        metavar="PATH",
    )
    metric: Words = option(
        "", "Score by these metrics of this package.", metavar="NAME,...", shown="the metric of each task"
    )
    longbench_e: bool = option(False, "Files of pred.py are LongBench-E: one score per length bucket.")
    keep_first_run: bool = option(False, "Of a file with several runs (pred.py appends), count the first only.")
    output: Path | None = option(None, "Also write the scores to this file.", metavar="FILE.json")


def score(options: ScoreOptions) -> bool:
    """Score existing predictions, without a model. Exit status 1 if a file could not be scored.

    Examples:
      # The answers of a run, by other metrics
      paged-eviction score results/llama --metric qa_f1,rouge

      # LongBench's pred.py: files; a folder of LongBench-E; files of several runs
      paged-eviction score pred/llama3/*.jsonl
      paged-eviction score pred_e/llama3 --longbench-e --output scores.json
      paged-eviction score pred_e --keep-first-run
    """
    from ..report.scoring import run_score

    return run_score(
        options.paths,
        options.output,
        metrics=words(options.metric),
        longbench_e=options.longbench_e,
        keep_first_run=options.keep_first_run,
    )
