"""What a person sees while a run is on, and after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from .budgets import rounding_notes
from .evaluation import Watch, evaluate_tasks, evaluate_texts
from .settings import TaskSettings, TextSettings
from .table import accuracy_grids, for_terminal, perplexity_grid


def run_tasks(settings: TaskSettings, output: Path, workers: int | None) -> None:
    """Run over tasks with a progress bar, then print the tables."""
    notes = Console(stderr=True)
    for length in settings.lengths:
        for note in rounding_notes(settings.parsed_budgets, length, settings.block_size):
            notes.print(f"note: {note}", highlight=False, soft_wrap=True)
    with progress(notes, "predictions") as watch:
        cells = evaluate_tasks(settings, output, workers, watch)
    Console().print(for_terminal(accuracy_grids(cells)))
    notes.print(f"written to {output}: results.jsonl, summary.json, accuracy.png, accuracy_by_task.png", soft_wrap=True)


def run_texts(settings: TextSettings, output: Path, workers: int | None) -> None:
    """Run over texts with a progress bar, then print the table."""
    notes = Console(stderr=True)
    for note in rounding_notes(settings.parsed_budgets, settings.length, settings.block_size):
        notes.print(f"note: {note}", highlight=False, soft_wrap=True)
    with progress(notes, "texts") as watch:
        curves = evaluate_texts(settings, output, workers, watch)
    Console().print(for_terminal([perplexity_grid(curves)]))
    notes.print(f"written to {output}: results.jsonl, summary.json, perplexity.png", soft_wrap=True)


@contextmanager
def progress(console: Console, unit: str) -> Iterator[Watch]:
    """A progress bar on the standard error, drawn from the first call of the function that moves it."""
    columns = (f"{unit} ", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task(unit, total=None)

    def watch(finished: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=finished, total=total)

    try:
        yield watch
    finally:
        bar.stop()
