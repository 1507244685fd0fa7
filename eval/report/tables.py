"""The tables of a report: scores, the official groups of LongBench, what answers cost, perplexities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pandas import DataFrame, MultiIndex

from ..caches.budgets import FULL
from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from .frame import LINE
from .longbench import BUCKETS, E_TASKS, V2_GROUPS, aggregates, official, parts
from .means import Mean, means, too_hard
from .table import Table

V1_TASKS = [name for name, task in TASKS.items() if not task.is_e]
_LINE = list(LINE)
#: Columns of tables, and their digits.
DIGITS = {
    "tokens": 1,
    "ended (%)": 1,
    "repeated (%)": 1,
    "identical (%)": 1,
    "KL (nats)": 4,
    "prefill (s)": 3,
    "time per token (ms)": 2,
    "peak memory (MiB)": 0,
    "KV held (MiB per row)": 2,
    "evicted tokens": 0,
}
_NOTE = (
    "Ended: by the model itself. Repeated: of all runs of four tokens, those that stood in the same answer before. "
    "Identical, KL: against the full cache. Seconds are of a batch; a shared prefill is that of the one that all "
    "caches continued from (--no-share-prefill). Evictions are of a row, over layers. For times: paged-eviction bench."
)


def score_tables(frame: DataFrame) -> Iterator[Table]:
    """Scores in percent: policies and budgets by tasks, one table per suite and length, then the official groups."""
    answers = parts(frame)
    v1, v2 = answers["task"].isin(V1_TASKS), answers["task"] == V2
    yield from _scores("longbench", "LongBench", answers[v1])
    for number, bucket in enumerate(BUCKETS, 1):
        yield from _scores(f"longbench_e_{number}", f"LongBench-E, {bucket} words", answers[answers["part"] == bucket])
    for length, here in answers[(answers["part"] == "") & ~v1].groupby("length"):
        title = f"{'Generated tasks' if length else 'Tasks'}, {_prompts(here)}"
        yield from _scores(f"scores_{length or 'own'}", title, here, digits=1)
    yield from _scores(V2, "LongBench v2", answers[v2], "part", digits=1)
    if v1.any():
        yield from _aggregates(answers[v1])


def _scores(name: str, title: str, here: DataFrame, column: str = "task", digits: int = 2) -> Iterator[Table]:
    """A table with a column for each task or part, if there are answers."""
    if here.empty:
        return
    of_tasks = column == "task"
    scores = official(here, [*LINE, "task", "part"]).droplevel("part" if of_tasks else "task")
    cells = scores.unstack(column).reindex(columns=here["task"].unique() if of_tasks else V2_GROUPS)
    if of_tasks and len(cells.columns) > 1:
        mean = means(here, LINE, "score", 100, ["task"]).reindex(cells.index)
        cells[f"mean of {len(cells.columns)}"] = mean.where(cells.notna().all(axis=1))
    cells = cells.rename(columns=lambda task: task.removesuffix("_e") if task in E_TASKS else task)
    counts = here.groupby([*LINE, column]).size()
    title = f"{title}: score in %, n {' to '.join(map(str, sorted({counts.min(), counts.max()})))}"
    best, note = list(cells), too_hard(here) if of_tasks else ""
    if not here["budget"].str.fullmatch(r"\d+|full").all():  # what shares and bytes came to
        cells.insert(0, "tokens", here.groupby(_LINE)["budget_tokens"].mean().round().astype("Int64"))
    yield from _table(name, title, cells, here, digits=digits, note=note, best=best)


def _aggregates(here: DataFrame) -> Iterator[Table]:
    """The means over all tasks of LongBench, as far as all of its tasks are there."""
    lines = {line: mine.droplevel(_LINE) for line, mine in official(here, [*LINE, "task"]).groupby(_LINE, sort=False)}
    every = {line: aggregates(mine.to_dict()) for line, mine in lines.items()}
    cells = {line: {one.name.removeprefix("LongBench, "): one.mean for one in them} for line, them in every.items()}
    frame = DataFrame.from_dict(cells, orient="index", dtype=object)
    frame.index = MultiIndex.from_tuples(frame.index, names=LINE)
    missing: dict[str, set[str]] = {}
    for one in (one for them in every.values() for one in them if one.missing):
        missing.setdefault(one.name, set()).update(one.missing)
    listed = {name: ", ".join(task for task in TASKS if task in tasks) for name, tasks in missing.items()}
    note = " ".join(f"{name}: no number without {tasks}." for name, tasks in listed.items())
    yield from _table("aggregates", "LongBench: official aggregates", frame, here, note=note, best=list(frame))


def measure_tables(frame: DataFrame) -> Iterator[Table]:
    """How answers go on and end, how far they agree with the full cache's, and what they cost: a table per length."""
    for length, here in frame.groupby("length"):
        # A batch counts once, however many rows it has: each has the numbers of all of it.
        share = 1 / here["batch_rows"].where(here["batch_rows"] > 0, 1)
        shared = here.assign(steps=here["decode_steps"] * share, decode=here["decode_seconds"] * share)
        groups = shared.groupby(_LINE, sort=False)
        costs, sums = (
            groups[["prefill_seconds", "kv_bytes", "evicted_tokens"]].mean(),
            groups[["steps", "decode"]].sum(),
        )
        sums = sums.where(sums > 0)
        columns = [
            means(here[here["ended"].notna()], LINE, "new_tokens"),  # of answers that were not fed
            *(means(here, LINE, name, 100) for name in ("ended", "repeated", "identical")),
            means(here, LINE, "kl"),
            costs["prefill_seconds"],
            1000 * sums["decode"] / sums["steps"],
            groups["peak_bytes"].max() / 2**20,
            costs["kv_bytes"] / 2**20,
            costs["evicted_tokens"],
        ]
        cells = DataFrame(dict(zip(DIGITS, columns, strict=True)), dtype=object).dropna(axis="columns", how="all")
        title = f"Answers and what they cost, {_prompts(here)}"
        best = [name for name in cells if name == "identical (%)"]
        yield from _table(f"answers_{length or 'own'}", title, cells, here, digits=DIGITS, note=_NOTE, best=best)


def text_table(curves: DataFrame) -> Iterator[Table]:
    """Perplexity of every policy at every budget.

    Args:
        curves: see `means.curves`.
    """
    table = curves.set_index(_LINE)
    full = {run: one.value for (run, _, policy), one in table["perplexity"].items() if policy == FULL}
    more = [
        None if run not in full or policy == FULL else Mean(100 * (one.value / full[run] - 1), held=one.held)
        for (run, _, policy), one in table["perplexity"].items()
    ]
    names = {"tokens": "budget in tokens", "perplexity": "perplexity", "predicted": "predicted tokens"}
    shown = table[list(names)].rename(columns=names)
    shown.insert(2, "against the full cache (%)", more)
    title, digits = "Perplexity: lower is better", {"against the full cache (%)": 1}
    yield from _table("perplexity", title, shown, curves, digits=digits, best=["perplexity"], lowest=True)


def _table(name: str, title: str, cells: DataFrame, of: DataFrame, **how: Any) -> Iterator[Table]:
    """A table of a line per run, budget and policy in the order of the frame that it is `of`, if it has a number."""
    cells = cells.reindex(MultiIndex.from_frame(of[_LINE].drop_duplicates())).dropna(how="all")
    if not cells.empty:
        yield Table(name, title, cells if any(of["run"]) else cells.droplevel("run"), **how)


def _prompts(here: DataFrame) -> str:
    """How long prompts are in tokens, as counted; what was asked for where the rows do not say."""
    tokens, length = here["prompt_tokens"].dropna(), here["length"].iloc[0]
    if tokens.empty:
        return f"prompts of {length} tokens" if length else "prompts of their own length"
    least, most = int(tokens.min()), int(tokens.max())
    span = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    asked = f" (asked for {length:,})" if length and (least, most) != (length, length) else ""
    return f"prompts of {span} tokens{asked}"
