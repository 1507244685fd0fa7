"""What is measured of answers beside their scores: agreement with the full cache, their course, time and memory;
and perplexities of texts."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, Series, concat

from ..caches.budgets import FULL
from ..tables.means import Mean, means
from ..tables.table import Table
from .runs import LINE, Run, frame_of, line_table, lines_of, prompts_of

MIB = 1024 * 1024
#: Columns of tables, and their digits.
AGREEMENT = {"identical tokens (%)": 1, "KL (nats)": 4, "answers compared": 0}
COURSE = {"tokens": 1, "ended (%)": 1, "repeated (%)": 1, "answers": 0}
COSTS = {
    "prefill (s)": 3,
    "time per token (ms)": 2,
    "peak memory (MiB)": 0,
    "KV held (MiB per row)": 2,
    "evicted tokens": 0,
}
_COURSE_NOTE = (
    "Ended: by the model itself, within what the task allows. Repeated: of all runs of four tokens, those "
    "that stood in the same answer before. A cache that holds too little can make answers longer, or go in circles."
)
_COST_NOTE = (
    "Seconds are of a batch, evictions of a row and summed over layers. Where a prefill was shared, its time is that "
    "of the one that all caches continued from (--no-share-prefill: each its own, and the peak memory). KV held is on "
    "the model's device. For times on an otherwise idle machine: paged-eviction bench."
)


def agreement(frame: DataFrame, by: Sequence[str]) -> DataFrame:
    """Agreement with the full cache, per group."""
    compared = frame[frame["identical"].notna() | frame["kl"].notna()]
    columns = means(frame, by, "identical", 100), means(frame, by, "kl"), compared.groupby(list(by), sort=False).size()
    return _columns(AGREEMENT, columns)


def costs(frame: DataFrame, by: Sequence[str]) -> DataFrame:
    """Time and memory per group. A batch counts once, however many rows it has: each has the numbers of all of it."""
    share = 1 / frame["batch_rows"].where(frame["batch_rows"] > 0, 1)
    shared = frame.assign(steps=frame["decode_steps"] * share, decode=frame["decode_seconds"] * share)
    groups = shared.groupby(list(by), sort=False)
    mean, sums = (
        groups[["prefill_seconds", "kv_bytes", "evicted_tokens"]].mean(),
        groups[["steps", "decode"]].sum(),
    )
    sums = sums.where(sums > 0)
    columns = [
        mean["prefill_seconds"],
        1000 * sums["decode"] / sums["steps"],
        groups["peak_bytes"].max() / MIB,
        mean["kv_bytes"] / MIB,
        mean["evicted_tokens"],
    ]
    return _columns(COSTS, columns).dropna(how="all")


def _columns(names: dict[str, int], columns: Sequence[Series]) -> DataFrame:
    return DataFrame(dict(zip(names, columns, strict=True)), dtype=object)


def agreement_table(runs: Sequence[Run]) -> Table | None:
    """One row per policy and budget, over all tasks; so are those below."""
    table, best = agreement(frame_of(runs), LINE), list(AGREEMENT)[:1]
    title = "Agreement with the full cache"
    return line_table("agreement", title, table, lines_of(runs), digits=AGREEMENT, best=best)


def course_table(runs: Sequence[Run]) -> Table | None:
    """How long answers are, whether they end, and whether they go round in circles; of those that were not fed."""
    frame = frame_of(runs)
    free = frame[frame["ended"].notna()]
    columns = [means(free, LINE, name, scale) for name, scale in (("new_tokens", 1), ("ended", 100), ("repeated", 100))]
    table = _columns(COURSE, [*columns, free.groupby(list(LINE), sort=False).size()])
    title = "How answers go on and end"
    return line_table("course", title, table, lines_of(runs), digits=COURSE, note=_COURSE_NOTE)


def efficiency_tables(runs: Sequence[Run]) -> list[Table]:
    """What answers cost, a table per length of prompts."""
    frame, tables = frame_of(runs), []
    for length in sorted(frame["length"].unique()):
        measured = costs(frame[frame["length"] == length], LINE)
        name, title = f"efficiency_{length or 'own'}", f"Efficiency, {prompts_of(runs, length)}"
        tables.append(line_table(name, title, measured, lines_of(runs), digits=COSTS, note=_COST_NOTE))
    return [table for table in tables if table]


def text_table(runs: Sequence[Run]) -> Table | None:
    """Perplexity of every policy at every budget."""
    table = concat([run.curves.assign(run=run.label) for run in runs]).set_index(list(LINE))
    full = {run: one for (run, _, policy), one in table["perplexity"].items() if policy == FULL}
    more = [
        None if run not in full or policy == FULL else Mean(100 * (one.value / full[run].value - 1), held=one.held)
        for (run, _, policy), one in table["perplexity"].items()
    ]
    shown = DataFrame(
        {
            "budget in tokens": table["tokens"],
            "perplexity": table["perplexity"],
            "against the full cache (%)": more,
            "predicted tokens": table["predicted"],
        },
        dtype=object,
    )
    title, digits = "Perplexity: lower is better", {"against the full cache (%)": 1}
    return line_table("perplexity", title, shown, lines_of(runs), digits=digits, best=["perplexity"], lowest=True)
