"""What a person sees while a run is on, and after it; in a run of several processes, from the main one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .budgets import rounding_notes
from .distributed import is_main_process, leave
from .evaluation import evaluate_tasks, evaluate_texts
from .requests import Request
from .settings import Settings, TaskSettings, TextSettings
from .store.completion import Outcome, Watch
from .store.completion import Progress as State
from .summaries.summary import Cell
from .summaries.table import accuracy_grids, for_terminal, perplexity_grid
from .tracking import log_run

#: Seconds between two lines about progress where there is no terminal to draw a bar on.
LINE_SECONDS = 15.0


def run_tasks(requests: Sequence[Request[TaskSettings]], workers: int | None, log_to: str | None = None) -> bool:
    """Runs over tasks, one after the other, each with a progress bar and tables; whether all rows are there.

    Args:
        requests: the runs.
        workers: processes that this one starts; None chooses.
        log_to: a tracker of experiments that is told of each finished run, see `tracking.log_run`.
    """
    complete = True
    for request in requests:
        notes = _notes()
        if len(requests) > 1:
            say(notes, f"{request.settings.model}: {request.output}")
        for length in request.settings.lengths:
            _say_rounding(notes, request.settings, length)
        with progress(notes, "answers") as watch:
            found = evaluate_tasks(request.settings, request.output, workers, watch, partial(_note, notes))
        if found is not None:
            outcome, cells = found
            outcome.notes.extend(cut_prompts(cells))
            complete &= _show(notes, outcome, [for_terminal(accuracy_grids(cells))] if cells else [])
            if log_to:
                log_run(log_to, request.settings, outcome, cells)
    leave()
    return complete


def run_texts(request: Request[TextSettings], workers: int | None, log_to: str | None = None) -> bool:
    """A run over texts with a progress bar and a table; whether all rows are there. Arguments as of `run_tasks`."""
    notes, complete = _notes(), True
    _say_rounding(notes, request.settings, request.settings.length)
    with progress(notes, "texts") as watch:
        found = evaluate_texts(request.settings, request.output, workers, watch, partial(_note, notes))
    if found is not None:
        outcome, curves = found
        complete = _show(notes, outcome, [for_terminal([perplexity_grid(curves)])] if curves else [])
        if log_to:
            log_run(log_to, request.settings, outcome, curves)
    leave()
    return complete


def cut_prompts(cells: Sequence[Cell]) -> list[str]:
    """A sentence on prompts that lost their middle, with the tasks they are of."""
    tasks = {cell.task: (cell.truncated, cell.samples) for cell in cells if cell.truncated}
    if not tasks:
        return []
    shown = ", ".join(f"{task} {cut} of {count}" for task, (cut, count) in tasks.items())
    return [f"prompts that were too long and lost their middle: {shown} (--max-length)"]


def _notes() -> Console:
    return Console(stderr=True, quiet=not is_main_process())


def say(console: Console, text: str) -> None:
    """One line, just as it is."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _note(notes: Console, text: str) -> None:
    say(notes, f"note: {text}")


def _say_rounding(notes: Console, settings: Settings, length: int) -> None:
    for note in rounding_notes(settings.parsed_budgets, length, settings):
        _note(notes, note)


def _show(notes: Console, outcome: Outcome, tables: Sequence[RenderableType]) -> bool:
    for table in tables:
        Console().print(table)
    for note in outcome.notes:
        _note(notes, note)
    path = outcome.folder.path
    say(notes, f"written to {path}: results.jsonl, run_meta.json, run.yaml, summary.json and plots")
    say(notes, f"tables and plots of everything: paged-eviction report {path}")
    if outcome.missing:
        reasons = "".join(f"\n  {count} rows: {reason}" for reason, count in outcome.failures)
        say(notes, f"{outcome.missing} rows are missing:{reasons}\nthe same command tries them again")
    return not outcome.missing


@contextmanager
def progress(console: Console, unit: str) -> Iterator[Watch]:
    """Shows how far a run is, from the first call of the function that is told: a bar, or lines in a log."""
    if not console.is_terminal:
        yield _lines(console, unit)
        return
    columns = (
        f"{unit} ",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "left",
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task(unit, total=None, last="")

    def watch(state: State) -> None:
        bar.start()
        bar.update(task, completed=state.finished + state.begun, total=state.total, last=state.last)

    try:
        yield watch
    finally:
        bar.stop()


def _lines(console: Console, unit: str) -> Callable[[State], None]:
    started = time.monotonic()
    shown = -LINE_SECONDS

    def watch(state: State) -> None:
        nonlocal shown
        seconds = time.monotonic() - started
        if seconds - shown >= LINE_SECONDS or (state.finished == state.total and not state.last):
            shown = seconds
            say(console, f"{state.finished}/{state.total} {unit}, {seconds:.0f} s {state.last}".rstrip())

    return watch
