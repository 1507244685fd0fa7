"""Tables of scores: one per suite and length, the official groups of LongBench, and every number by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..caches.budgets import FULL
from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from ..store.results import Row
from ..store.summaries.aggregates import BUCKETS, V2_GROUPS, aggregates, bucket, bucket_scores, task_score, v2_scores
from ..store.summaries.summary import NOTHING_EVICTED, Cell, all_held, mean_of, mean_of_means, summarise
from ..store.summaries.table import Column, Spread, Table, Value, find_best, find_shades, without_empty
from .runs import Run, Variant, prompts_of


@dataclass(frozen=True)
class Line:
    """One row of a table: a policy at a budget, in one of the runs."""

    run: Run
    variant: Variant

    @property
    def group(self) -> tuple[str, str] | None:
        """What it may be compared with; nothing for the full cache."""
        policy, budget = self.variant
        return None if policy == FULL else (self.run.label, budget)


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """Every policy and budget of every run."""
    return [Line(run, variant) for run in runs for variant in run.variants]


def table_of_lines(
    name: str,
    title: str,
    lines: Sequence[Line],
    columns: Sequence[Column],
    values: Callable[[Line], Sequence[Value]],
    note: str = "",
    best: Sequence[int] = (),
    better: Callable[[Iterable[float]], float] = max,
    behind: Callable[[Line, int], Sequence[Row]] = lambda line, at: (),
) -> Table | None:
    """A table of one row per line; a line without a number is left out, and so is a table without a row.

    Args:
        values: of the `columns` for one line; run, budget and policy are put before them.
        best: columns whose best number per run and budget is marked, and that are shaded.
        better: max or min.
        behind: the rows that the number of a line in one of the `columns` is made of; it is marked where nothing was
            evicted in any of them.
    """
    several = len({line.run.label for line in lines}) > 1
    head = [Column("run")] * several + [Column("budget"), Column("policy")]
    found = [(line, tuple(values(line))) for line in lines]
    found = [(line, numbers) for line, numbers in found if any(number is not None for number in numbers)]
    if not found:
        return None
    rows = tuple(
        (*((line.run.label,) if several else ()), line.variant[1], line.variant[0], *numbers) for line, numbers in found
    )
    every = (*head, *columns)
    groups = [line.group for line, _ in found]
    breaks = frozenset(index for index in range(1, len(rows)) if groups[index] != groups[index - 1])
    picked = [len(head) + index for index in best]
    marked = frozenset(
        (row, len(head) + at)
        for row, (line, numbers) in enumerate(found)
        for at, number in enumerate(numbers)
        if number is not None and all_held(behind(line, at))
    )
    note = f"{note} {NOTHING_EVICTED}".strip() if marked else note
    winners = find_best(rows, every, groups, picked, better)
    shades = find_shades(rows, [line.run.label for line, _ in found], [not group for group in groups], picked, better)
    return Table(name, title, every, rows, note, winners, breaks, 2, several, shades, marked)


def score_tables(runs: Sequence[Run]) -> list[Table]:
    """Scores in percent: policies and budgets by tasks, one table per suite and length, then the official groups."""
    lines = [line for line in lines_of(runs) if line.run.rows]
    found = [_task_table(lines, sheet) for sheet in _sheets(runs)]
    return [table for table in [*found, _v2_table(lines), _aggregate_table(lines)] if table]


@dataclass(frozen=True)
class _Sheet:
    name: str
    title: str
    tasks: tuple[str, ...]
    length: int | None
    bucket: str | None = None
    digits: int = 2


def _sheets(runs: Sequence[Run]) -> Iterator[_Sheet]:
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    plain = tuple(task for task in tasks if task in TASKS and not TASKS[task].is_e)
    by_length = tuple(task for task in tasks if task in TASKS and TASKS[task].is_e)
    if plain:
        yield _Sheet("longbench", "LongBench", plain, None)
    if by_length:
        for index, name in enumerate(BUCKETS):
            yield _Sheet(f"longbench_e_{index + 1}", f"LongBench-E, {name} words", by_length, None, name)
    others = [task for task in tasks if task not in TASKS and task != V2]
    lengths = dict.fromkeys(length for run in runs for task in others for length in run.lengths(task))
    for length in sorted(lengths, key=lambda length: length or 0):
        size = prompts_of(runs, length)
        here = tuple(task for task in others if any(length in run.lengths(task) for run in runs))
        yield _Sheet(f"scores_{length or 'own'}", f"Generated tasks, {size}", here, length, digits=1)


def _task_table(lines: Sequence[Line], sheet: _Sheet) -> Table | None:
    columns = [Column(task.removesuffix("_e") if sheet.bucket else task, sheet.digits) for task in sheet.tasks]
    several = len(columns) > 1

    def rows_of(line: Line, tasks: Iterable[str]) -> list[Row]:
        rows = (row for task in tasks for row in line.run.of(task, sheet.length, line.variant))
        return [row for row in rows if _within(row, sheet)]

    def behind(line: Line, at: int) -> list[Row]:
        return rows_of(line, sheet.tasks[at : at + 1] or sheet.tasks)

    def values(line: Line) -> list[Value]:
        groups = [[float(row["score"]) for row in rows_of(line, [task])] for task in sheet.tasks]
        mean = [mean_of_means(groups, 100) if all(groups) else None] if several else []
        return [*map(_official, groups), *mean]

    best = range(len(columns) + several)
    if several:
        columns.append(Column(f"mean of {len(sheet.tasks)}", sheet.digits))
    title = f"{sheet.title}: score in %"
    return table_of_lines(sheet.name, title, lines, columns, values, best=best, behind=behind)


def _official(scores: Sequence[float]) -> Spread | None:
    """As the official code rounds, and the standard error."""
    mean, score = mean_of(scores, 100), task_score(scores)
    return None if mean is None or score is None else Spread(score, mean.error)


def _within(row: Row, sheet: _Sheet) -> bool:
    if sheet.bucket is None:
        return True
    length = row.get("record_length")
    return length is not None and bucket(length) == sheet.bucket


def _v2_table(lines: Sequence[Line]) -> Table | None:
    def values(line: Line) -> list[Value]:
        found = v2_of(line.run, line.variant)
        return [found[name] for name in V2_GROUPS]

    columns = [Column(name, 1) for name in V2_GROUPS]
    title, best = "LongBench v2: accuracy in %", range(len(columns))
    return table_of_lines(
        V2, title, lines, columns, values, best=best, behind=lambda line, at: line.run.of(V2, None, line.variant)
    )


def v2_of(run: Run, variant: Variant) -> dict[str, float | None]:
    """Accuracies of LongBench v2 of one policy and budget."""
    rows = run.of(V2, None, variant)
    return v2_scores(
        (str(_metadata(row).get("difficulty")), str(_metadata(row).get("length")), row["score"]) for row in rows
    )


def _metadata(row: Row) -> dict[str, Any]:
    return row.get("metadata") or {}


def buckets_of(run: Run, task: str, variant: Variant) -> dict[str, float | None]:
    """Scores of a task of LongBench-E by bucket."""
    rows = run.of(task, None, variant)
    return bucket_scores((row["record_length"], row["score"]) for row in rows if row.get("record_length") is not None)


def v1_scores(run: Run, variant: Variant) -> dict[str, float | None]:
    """Scores of the tasks of LongBench v1 that the run has."""
    tasks = [task for task in run.tasks if task in TASKS and not TASKS[task].is_e]
    return {task: task_score([row["score"] for row in run.of(task, None, variant)]) for task in tasks}


def _aggregate_table(lines: Sequence[Line]) -> Table | None:
    known = [line for line in lines if v1_scores(line.run, line.variant)]
    if not known:
        return None
    shown = [aggregates(v1_scores(line.run, line.variant)) for line in known]
    columns = [Column(aggregate.name.removeprefix("LongBench, ")) for aggregate in shown[0]]

    def values(line: Line) -> list[Value]:
        return [aggregate.value for aggregate in aggregates(v1_scores(line.run, line.variant))]

    def behind(line: Line, at: int) -> list[Row]:
        return [row for task in v1_scores(line.run, line.variant) for row in line.run.of(task, None, line.variant)]

    title, note, best = "LongBench: official aggregates", missing_tasks(known), range(len(columns))
    return table_of_lines("aggregates", title, known, columns, values, note, best, behind=behind)


def missing_tasks(lines: Sequence[Line]) -> str:
    """Why an aggregate of LongBench v1 has no number, in one sentence; empty if none lacks one."""
    missing: dict[str, set[str]] = {}
    for line in lines:
        for aggregate in aggregates(v1_scores(line.run, line.variant)):
            if aggregate.missing:
                missing.setdefault(aggregate.name, set()).update(aggregate.missing)
    order = list(TASKS)
    return " ".join(
        f"{name}: no number without {', '.join(sorted(tasks, key=order.index))}." for name, tasks in missing.items()
    )


def every_score(runs: Sequence[Run]) -> Table | None:
    """One row per run, task, length, policy and budget."""
    names = "run, task, length, policy, budget, budget in tokens, score in %, standard error, answers"
    cells = [(run, cell) for run in runs for cell in cells_of(run)]
    if not cells:
        return None
    rows = tuple(
        (
            run.label or None,
            cell.task,
            cell.length,
            cell.policy,
            cell.budget,
            cell.tokens,
            round(100 * cell.accuracy, 2),
            None if cell.percent.error is None else round(cell.percent.error, 2),
            cell.samples,
        )
        for run, cell in cells
    )
    columns = tuple(map(Column, names.split(", ")))
    marked = frozenset((row, 6) for row, (_, cell) in enumerate(cells) if cell.all_held)
    return without_empty(
        Table("scores", "Every score", columns, rows, NOTHING_EVICTED if marked else "", marked=marked)
    )


def cells_of(run: Run) -> list[Cell]:
    """The run's cells, ordered by task, length, budget and policy."""
    return [
        cell
        for task in run.tasks
        for length in run.lengths(task)
        for variant in run.variants
        for cell in summarise(run.of(task, length, variant))
    ]
