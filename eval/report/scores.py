"""Tables of scores: one per suite and length, and the official groups of LongBench."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, MultiIndex

from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from ..tables.longbench import BUCKETS, E_TASKS, V2_GROUPS, aggregates, official, parts
from ..tables.means import Mean, means, too_hard
from ..tables.table import Table
from .runs import LINE, Run, frame_of, line_table, lines_of, prompts_of

V1_TASKS = [name for name, task in TASKS.items() if not task.is_e]


def score_tables(runs: Sequence[Run]) -> list[Table]:
    """Scores in percent: policies and budgets by tasks, one table per suite and length, then the official groups."""
    frame, lines = frame_of(runs), lines_of(runs)
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    v1, in_e = ([task for task in tasks if task in suite] for suite in (V1_TASKS, E_TASKS))
    tables = [_task_table(frame, lines, "longbench", "LongBench", v1)]
    for number, bucket in enumerate(BUCKETS, 1):
        title = f"LongBench-E, {bucket} words"
        tables.append(_task_table(frame, lines, f"longbench_e_{number}", title, in_e, bucket=bucket))
    others = [place for run in runs for place in run.places if place[0] not in TASKS and place[0] != V2]
    for length in sorted({length for _, length in others}):
        here = [task for task in tasks if (task, length) in others]
        kind = "Generated tasks" if length else "Tasks"
        name, title = f"scores_{length or 'own'}", f"{kind}, {prompts_of(runs, length)}"
        tables.append(_task_table(frame, lines, name, title, here, length, digits=1))
    return [table for table in [*tables, _v2_table(frame, lines), _aggregate_table(frame, lines)] if table]


def _task_table(
    frame: DataFrame,
    lines: MultiIndex,
    name: str,
    title: str,
    tasks: Sequence[str],
    length: int = 0,
    bucket: str = "",
    digits: int = 2,
) -> Table | None:
    here = parts(frame[frame["task"].isin(tasks) & (frame["length"] == length)])
    here = here[here["part"] == bucket]
    cells = official(here, [*LINE, "part", "task"]).droplevel("part").unstack("task").reindex(columns=list(tasks))
    if len(tasks) > 1:
        mean = means(here, LINE, "score", 100, ["task"]).reindex(cells.index)
        cells[f"mean of {len(tasks)}"] = mean.where(cells.notna().all(axis=1))
    if bucket:
        cells = cells.rename(columns=lambda name: name.removesuffix("_e"))
    note = too_hard(here)
    return line_table(name, f"{title}: score in %", cells, lines, digits=digits, note=note, best=list(cells))


def _v2_table(frame: DataFrame, lines: MultiIndex) -> Table | None:
    cells = (
        official(parts(frame[frame["task"] == V2]), [*LINE, "part"]).unstack("part").reindex(columns=list(V2_GROUPS))
    )
    return line_table(V2, "LongBench v2: accuracy in %", cells, lines, digits=1, best=V2_GROUPS)


def _aggregate_table(frame: DataFrame, lines: MultiIndex) -> Table | None:
    here = frame[frame["task"].isin(V1_TASKS)]
    tasks = official(here, [*LINE, "task"])
    missing: dict[str, set[str]] = {}
    cells: dict[tuple[str, ...], dict[str, Mean | None]] = {}
    for line, mine in tasks.groupby(list(LINE), sort=False):
        every = aggregates(mine.droplevel(list(LINE)).to_dict())
        cells[line] = {one.name.removeprefix("LongBench, "): one.mean for one in every}
        for one in every:
            missing.setdefault(one.name, set()).update(one.missing)
    if not cells:
        return None
    table = DataFrame.from_dict(cells, orient="index", dtype=object)
    table.index = MultiIndex.from_tuples(cells, names=LINE)
    note = " ".join(
        f"{name}: no number without {', '.join(task for task in TASKS if task in tasks)}."
        for name, tasks in missing.items()
        if tasks
    )
    return line_table("aggregates", "LongBench: official aggregates", table, lines, note=note, best=list(table))
