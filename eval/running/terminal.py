"""What a person sees while a run is on, and after it; in a run of several processes, from the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite

from rich.console import Console, RenderableType

from ..caches.budgets import budgets_of, rounding_notes
from ..console import progress, say
from ..grouping import grouped
from ..options.settings import Settings, TaskSettings, TextSettings
from ..store.notes import notes_of
from ..store.results import Row
from .completion import Outcome
from .evaluation import evaluate_tasks, evaluate_texts
from .processes.distributed import is_main_process, leave
from .requests import Request


def run_tasks(
    requests: Sequence[Request[TaskSettings]],
    workers: int | None,
    log_samples: bool = False,
    shard: str | None = None,
    fill: bool = False,
) -> bool:
    """Runs over tasks, one after the other, each with a progress bar and tables; whether all rows are there.

    Args:
        requests: the runs.
        workers: processes that this one starts; None chooses.
        log_samples: write the exact prompts, too.
        shard: which of the questions are this process's, such as "3/8".
        fill: also what earlier commands asked in the same folder.
    """
    complete = True
    for request in requests:
        notes = _notes()
        if len(requests) > 1:
            say(notes, f"{request.settings.model}: {request.output}")
        for length in request.settings.lengths:
            _say_rounding(notes, request.settings, length)
        with progress(notes, "answers", "--limit 8, fewer --tasks, --policies or --budgets") as watch:
            outcome = evaluate_tasks(
                request.settings, request.output, workers, watch, partial(_note, notes), log_samples, shard, fill
            )
        if outcome is not None:
            outcome.notes.extend([*cut_prompts(outcome.rows), *notes_of(outcome.rows)])
            complete &= _show(notes, outcome, _task_tables)
    leave()
    return complete


def run_texts(
    request: Request[TextSettings], workers: int | None, shard: str | None = None, fill: bool = False
) -> bool:
    """A run over texts with a progress bar and a table; whether all rows are there. Arguments as of `run_tasks`."""
    notes, complete = _notes(), True
    _say_rounding(notes, request.settings, request.settings.length)
    with progress(notes, "texts", "a smaller --limit or --length, fewer --policies or --budgets") as watch:
        outcome = evaluate_texts(request.settings, request.output, workers, watch, partial(_note, notes), shard, fill)
    if outcome is not None:
        complete = _show(notes, outcome, _text_tables)
    leave()
    return complete


def cut_prompts(rows: Sequence[Row]) -> list[str]:
    """A sentence on prompts that lost their middle, with the tasks they are of."""
    tasks = grouped(rows, lambda row: row["task"])
    cut = {task: {row["id"] for row in mine if row.get("truncated")} for task, mine in tasks.items()}
    shown = [f"{task} {len(cut[task])} of {len({row['id'] for row in tasks[task]})}" for task in tasks if cut[task]]
    return [f"prompts that were too long and lost their middle: {', '.join(shown)} (--max-length)"] if shown else []


def _task_tables(outcome: Outcome) -> Iterator[RenderableType]:
    from ..tables.frame import long_frame
    from ..tables.grids import accuracy_grids
    from ..tables.terminal import to_terminal

    for grids in accuracy_grids(long_frame(outcome.rows)):
        yield to_terminal(*grids)


def _text_tables(outcome: Outcome) -> Iterator[RenderableType]:
    from ..tables.grids import perplexity_grid
    from ..tables.means import curves
    from ..tables.terminal import to_terminal

    table = curves(outcome.rows)
    odd = [f"{one.policy} at {one.budget}" for one in table.itertuples() if not isfinite(one.perplexity.value)]
    if odd:
        outcome.notes.append(
            f"{', '.join(odd)}: some losses are no numbers or too large for a perplexity; look at the full cache, and "
            "at --dtype float32"
        )
    if len(table):
        yield to_terminal(perplexity_grid(table))


def _notes() -> Console:
    return Console(stderr=True, quiet=not is_main_process())


def _note(notes: Console, text: str) -> None:
    say(notes, f"note: {text}")


def _say_rounding(notes: Console, settings: Settings, length: int) -> None:
    for note in rounding_notes(budgets_of(settings), length, settings):
        _note(notes, note)


def _show(notes: Console, outcome: Outcome, tables: Callable[[Outcome], Iterator[RenderableType]]) -> bool:
    for table in () if outcome.others else tables(outcome):
        Console().print(table)
    for note in outcome.notes:
        _note(notes, note)
    path = outcome.folder.path
    if outcome.others:
        say(notes, f"{outcome.others} rows are those of other shards; the last one to end shows the tables")
    else:
        say(notes, f"written to {path}: rows, settings, run.yaml, summary.json and plots")
        say(notes, f"tables and plots of everything: paged-eviction report {path}")
    if outcome.missing:
        reasons = "".join(f"\n  {count} rows: {reason}" for reason, count in outcome.failures)
        say(notes, f"{outcome.missing} rows are missing:{reasons}\nthe same command tries them again")
    return not outcome.missing
