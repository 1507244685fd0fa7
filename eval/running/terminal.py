"""What a person sees while a run is on, and after it; in a run of several processes, from the main one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..caches.budgets import budgets_of, rounding_notes
from ..console import progress, say
from ..options.settings import Settings, TaskSettings, TextSettings
from ..store.notes import notes_of
from .evaluation import Outcome, evaluate
from .processes.distributed import is_main_process, leave
from .requests import Request
from .variants import variants

if TYPE_CHECKING:  # brings pandas, which a run does without until its end
    from ..report.table import Table


def shorter(settings: Settings, total: int) -> str:
    """What makes a run of so many rows shorter, as far as it has more than one of a thing."""
    places = len(settings.tasks) * len(settings.lengths or "-") if isinstance(settings, TaskSettings) else 1
    each = total // (places * len(variants(settings)))
    words = [f"--limit {-(-each // 4)}"] if each > 1 else []
    if isinstance(settings, TextSettings):
        words.append("a smaller --length")
    several = {"tasks": getattr(settings, "tasks", ()), "policies": settings.policies, "budgets": settings.budgets}
    words += [f"fewer --{name}" for name, listed in several.items() if len(listed) > 1]
    return ", ".join(words) or "a faster device"


def run(request: Request[Any]) -> bool:
    """A run with a progress bar and tables; whether all rows are there."""
    notes, settings = Console(stderr=True, quiet=not is_main_process()), request.settings
    of_texts = isinstance(settings, TextSettings)
    for length in (settings.length,) if of_texts else settings.lengths:
        for note in rounding_notes(budgets_of(settings), length, settings):
            _note(notes, note)
    with progress(notes, "texts" if of_texts else "answers", partial(shorter, settings)) as watch:
        outcome = evaluate(request, watch, partial(_note, notes))
    complete = True
    if outcome is not None:
        if not of_texts:
            outcome.notes.extend(notes_of(outcome.rows))
        complete = _show(notes, outcome, (_text_tables if of_texts else _task_tables)(outcome, settings))
    leave()
    return complete


def _task_tables(outcome: Outcome, settings: TaskSettings) -> Iterator[Table]:
    from ..report.frame import long_frame
    from ..report.tables import score_tables

    yield from score_tables(long_frame(outcome.rows, settings=settings.as_json()))


def _text_tables(outcome: Outcome, settings: TextSettings) -> Iterator[Table]:
    from ..report.frame import text_frame
    from ..report.means import curves
    from ..report.tables import text_table

    table = curves(text_frame(outcome.rows, settings=settings.as_json()))
    odd = [f"{one.policy} at {one.budget}" for one in table.itertuples() if not isfinite(one.perplexity.value)]
    if odd:
        outcome.notes.append(
            f"{', '.join(odd)}: some losses are no numbers or too large for a perplexity; look at the full cache, and "
            "at --dtype float32"
        )
    yield from text_table(table)


def _note(notes: Console, text: str) -> None:
    say(notes, f"note: {text}")


def _show(notes: Console, outcome: Outcome, tables: Iterable[Table]) -> bool:
    for table in () if outcome.others else tables:
        table.show(Console())
    for note in outcome.notes:
        _note(notes, note)
    if outcome.others:
        say(notes, f"{outcome.others} rows are those of other shards; the last one to end shows the tables")
    else:
        say(notes, f"written to {outcome.path}: rows, settings, run.yaml and summary.json")
        say(notes, f"all tables and plots: paged-eviction report {outcome.path}")
    if outcome.missing:
        reasons = "".join(f"\n  {count} rows: {reason}" for reason, count in outcome.failures)
        say(notes, f"{outcome.missing} rows are missing:{reasons}\nthe same command tries them again")
    return not outcome.missing
