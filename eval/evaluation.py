"""A whole run: the missing rows are computed and appended, then everything is summarised and drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from .environment import hardware, versions
from .models import load_tokenizer
from .perplexity import make_text_jobs, run_texts, text_row_key
from .plot import plot_accuracy, plot_accuracy_by_task, plot_perplexity
from .prompts import make_batches
from .results import ResultFolder, Row
from .runner import batch_keys, row_key, run_batch
from .settings import Settings, TaskSettings, TextSettings
from .summary import Cell, Curve, curves, summarise
from .workers import RunJob, default_workers, run_jobs

#: Called with the number of finished rows and of all rows, at the start and after every group of rows.
Watch = Callable[[int, int], None]
Key = TypeVar("Key", bound=tuple[Any, ...])


def evaluate_tasks(settings: TaskSettings, output: Path, workers: int | None, watch: Watch) -> list[Cell]:
    """Answer every question under every policy and budget.

    Args:
        settings: what is asked.
        output: folder of results; a run with the same settings is continued.
        workers: processes; None chooses.
        watch: told of progress.
    """
    folder = ResultFolder(output, settings.as_json())
    found = make_batches(settings, load_tokenizer(settings))
    jobs = [(batch, batch_keys(settings, batch)) for batch in found]
    cells = summarise(_complete(folder, settings, run_batch, row_key, jobs, workers, watch))
    folder.write_json("summary.json", [asdict(cell) for cell in cells])
    plot_accuracy(cells, output / "accuracy.png")
    plot_accuracy_by_task(cells, output / "accuracy_by_task.png")
    return cells


def evaluate_texts(settings: TextSettings, output: Path, workers: int | None, watch: Watch) -> list[Curve]:
    """Predict every text under every policy and budget; arguments as for `evaluate_tasks`."""
    folder = ResultFolder(output, settings.as_json())
    found = make_text_jobs(settings, load_tokenizer(settings))
    jobs = [(job, job.keys()) for job in found]
    summary = curves(_complete(folder, settings, run_texts, text_row_key, jobs, workers, watch))
    folder.write_json("summary.json", [asdict(curve) for curve in summary])
    plot_perplexity(summary, found[0].length, output / "perplexity.png")
    return summary


def _complete(
    folder: ResultFolder,
    settings: Settings,
    run: RunJob[Any, Any],
    key_of: Callable[[Row], Key],
    jobs: Sequence[tuple[Any, list[Key]]],
    workers: int | None,
    watch: Watch,
) -> list[Row]:
    """Append the rows that are missing; return all of them in the order of the jobs."""
    found = {key_of(row): row for row in folder.rows()}
    open_jobs = [(job, found.keys() & keys) for job, keys in jobs if not found.keys() >= set(keys)]
    total = sum(len(keys) for _, keys in jobs)
    count = workers or default_workers(settings, len(open_jobs))
    watch(len(found), total)
    started, before = time.perf_counter(), folder.meta.get("seconds", 0.0)
    for rows in run_jobs(run, settings, open_jobs, count):
        folder.append(rows)
        found |= {key_of(row): row for row in rows}
        watch(len(found), total)
        folder.write_meta({"seconds": round(before + time.perf_counter() - started, 1)})
    if open_jobs:
        folder.write_meta({"versions": versions(), "hardware": hardware(settings.device, count)})
    return [found[key] for _, keys in jobs for key in keys]
