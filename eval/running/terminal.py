"""What a person sees while a run is on, and after it; in a run of several processes, from the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    from ..tables.table import Table


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
        complete = _show(notes, outcome, _text_tables if of_texts else _task_tables)
    leave()
    return complete


def _task_tables(outcome: Outcome) -> Iterator[list[Table]]:
    from ..tables.frame import long_frame
    from ..tables.grids import accuracy_grids

    yield from accuracy_grids(long_frame(outcome.rows))


def _text_tables(outcome: Outcome) -> Iterator[list[Table]]:
    from ..tables.grids import perplexity_grid
    from ..tables.means import curves

    table = curves(outcome.rows)
    odd = [f"{one.policy} at {one.budget}" for one in table.itertuples() if not isfinite(one.perplexity.value)]
    if odd:
        outcome.notes.append(
            f"{', '.join(odd)}: some losses are no numbers or too large for a perplexity; look at the full cache, and "
            "at --dtype float32"
        )
    if len(table):
        yield [perplexity_grid(table)]


def _note(notes: Console, text: str) -> None:
    say(notes, f"note: {text}")


def _show(notes: Console, outcome: Outcome, tables: Callable[[Outcome], Iterator[list[Table]]]) -> bool:
    from ..tables.terminal import show

    for table, *parts in () if outcome.others else tables(outcome):
        show(Console(), table, parts)
    for note in outcome.notes:
        _note(notes, note)
    if outcome.others:
        say(notes, f"{outcome.others} rows are those of other shards; the last one to end shows the tables")
    else:
        say(notes, f"written to {outcome.path}: rows, settings, run.yaml, summary.json and plots")
        say(notes, f"tables and plots of everything: paged-eviction report {outcome.path}")
    if outcome.missing:
        reasons = "".join(f"\n  {count} rows: {reason}" for reason, count in outcome.failures)
        say(notes, f"{outcome.missing} rows are missing:{reasons}\nthe same command tries them again")
    return not outcome.missing
