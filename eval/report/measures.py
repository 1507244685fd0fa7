"""What is measured of answers beside their scores: agreement with the full cache, their course, time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pandas import DataFrame

from ..store.results import Row
from ..store.summaries.summary import mean_of
from ..store.summaries.table import Column, Table, Value
from .runs import Run, prompts_of
from .scores import Line, lines_of, table_of_lines

MIB = 1024 * 1024
Measures = dict[str, float]
"""Numbers by the names in `COLUMNS`, those that are not known left out."""

#: What tables call them.
COLUMNS = {
    "identical": Column("identical tokens (%)", 1),
    "kl": Column("KL (nats)", 4),
    "compared": Column("answers compared"),
    "tokens": Column("tokens", 1),
    "ended": Column("ended (%)", 1),
    "repeated": Column("repeated (%)", 1),
    "free": Column("answers"),
    "prefill": Column("prefill (s)", 3),
    "compression": Column("compression (s)", 4),
    "step": Column("time per token (ms)", 2),
    "rate": Column("tokens/s", 1),
    "cache_share": Column("in the cache (%)", 1),
    "peak": Column("peak memory (MiB)", 0),
    "held": Column("KV held (MiB per row)", 2),
    "host": Column("in host memory (MiB per row)", 2),
    "evicted_tokens": Column("evicted tokens", 0),
    "evicted_blocks": Column("blocks evicted while answering", 1),
    "batch": Column("rows per batch", 1),
}
_AGREEMENT = ("identical", "kl", "compared")
_COURSE = ("tokens", "ended", "repeated", "free")
_COSTS = tuple(COLUMNS)[tuple(COLUMNS).index("prefill") :]
_COURSE_NOTE = (
    "Ended: by the model itself, within what the task allows. Repeated: of all runs of four tokens, those "
    "that stood in the same answer before. A cache that holds too little can make answers longer, or go in circles."
)
_COST_NOTE = (
    "Seconds are of a batch, evictions of a row and summed over layers. Evicted tokens were read and are no longer "
    "held. Evicted blocks are those that were overwritten one by one while answering; what leaves at once when "
    "the prompt is compressed counts as tokens only, so short answers have few blocks or none. Where a prefill "
    "was shared, prefill is the time of the one that all caches continued from, and compression what this cache "
    "added. KV held is on the model's device, what a disposal keeps there included."
)
#: Columns of the frame that rows have under `efficiency`.
_EFFICIENCY = (
    "batch_rows prefill_seconds compress_seconds decode_seconds decode_steps cache_seconds peak_bytes kv_bytes "
    "host_bytes evicted_tokens evicted_blocks"
).split()


def measures_of(rows: Iterable[Row]) -> Measures:
    """Means over answers. A batch counts once, however many rows it has: each has the numbers of the whole batch."""
    listed = list(rows)
    free = [row for row in listed if row.get("ended") is not None]  # an answer that was fed has no course of its own
    compared = [row["agreement"] for row in listed if row.get("agreement")]
    found: dict[str, float | None] = {
        "identical": mean_of((each.get("identical") for each in compared), 100),
        "kl": mean_of(each.get("kl") for each in compared),
        "compared": len(compared) or None,
        "tokens": mean_of(row["new_tokens"] for row in free),
        "ended": mean_of((row["ended"] for row in free), 100),
        "repeated": mean_of((row["repeated"] for row in free), 100),
        "free": len(free) or None,
        **_costs([row for row in listed if row.get("efficiency")]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _costs(rows: Sequence[Row]) -> dict[str, float | None]:
    if not rows:
        return {}
    frame = DataFrame([row["efficiency"] for row in rows]).reindex(columns=_EFFICIENCY).astype(float)
    # The first token of an answer comes with the prefill.
    frame["later_tokens"] = [max((row.get("new_tokens") or 0) - 1, 0) for row in rows]
    shares = frame.div(frame.batch_rows.where(frame.batch_rows > 0, 1), axis=0)
    decode, inside = shares.decode_seconds.sum(), shares.decode_seconds[frame.cache_seconds.notna()].sum()
    tokens = frame.later_tokens[frame.decode_seconds.notna()].sum()
    means = frame.mean()
    return {
        "prefill": _known(means.prefill_seconds),
        "compression": _known(means.compress_seconds),
        "step": _ratio(1000 * decode, shares.decode_steps.sum()),
        "rate": _ratio(tokens, decode) or None,
        "cache_share": _ratio(100 * shares.cache_seconds.sum(), inside),
        "peak": _known(frame.peak_bytes.max() / MIB),
        "held": _known(means.kv_bytes / MIB),
        "host": _known(means.host_bytes / MIB) or None,
        "evicted_tokens": _known(means.evicted_tokens),
        "evicted_blocks": _known(means.evicted_blocks),
        "batch": _known(means.batch_rows),
    }


def _known(value: float) -> float | None:
    return None if value != value else float(value)


def _ratio(above: float, below: float) -> float | None:
    return float(above / below) if below else None


def agreement_table(runs: Sequence[Run]) -> Table | None:
    """One row per policy and budget, over all tasks; so are those below."""
    return _table("agreement", "Agreement with the full cache", runs, _AGREEMENT, best=[0])


def course_table(runs: Sequence[Run]) -> Table | None:
    """How long answers are, whether they end, and whether they go round in circles."""
    return _table("course", "How answers go on and end", runs, _COURSE, _COURSE_NOTE)


def efficiency_tables(runs: Sequence[Run]) -> list[Table]:
    """What answers cost, a table per length of prompts."""
    lengths = sorted({length for run in runs for length in run.all_lengths}, key=lambda length: length or 0)
    named = [(f"efficiency_{length or 'own'}", f"Efficiency, {prompts_of(runs, length)}", length) for length in lengths]
    tables = (_table(name, title, runs, _COSTS, _COST_NOTE, [length]) for name, title, length in named)
    return [table for table in tables if table]


def _table(
    name: str,
    title: str,
    runs: Sequence[Run],
    names: Sequence[str],
    note: str = "",
    lengths: Sequence[int | None] | None = None,
    best: Sequence[int] = (),
) -> Table | None:
    lines = lines_of(runs)
    found = {id(line): measures_of(line.run.answers(line.variant, lengths)) for line in lines}
    shown = [each for each in names if each != "host" or any(each in one for one in found.values())]

    def values(line: Line) -> list[Value]:
        return [found[id(line)].get(each) for each in shown]

    def behind(line: Line, at: int) -> list[Row]:
        rows = line.run.answers(line.variant, lengths) if best and shown[at] != "compared" else []
        return [row for row in rows if row.get("agreement")]

    columns = [COLUMNS[each] for each in shown]
    return table_of_lines(name, title, lines, columns, values, note, best, behind=behind)
