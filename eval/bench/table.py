"""Tables of a benchmark for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_paged_eviction.naming.sizes import readable_bytes

from ..grouping import grouped
from ..report.table import Table, simple_table
from ..store.results import Row
from .rows import MEASURED, BenchKey, ratio, row_key
from .variants import FLOOR, FLOOR_COMPILED, FULL, FULL_COMPILED, PAGED, STATIC

#: Which step times are divided by which; for the floors the context is None.
PAIRS = (
    (PAGED, FLOOR),
    *((name, FLOOR_COMPILED) for name in STATIC),
    (FULL, PAGED),
    *((FULL, name) for name in STATIC),
    *((FULL_COMPILED, name) for name in STATIC),
)
_COLUMNS = ("variant", "context", "ms", "spread", "tokens/s", "limit", "KV held", "peak", "cache", "eviction")


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Two tables for each budget and batch size: steps, and their ratios."""
    for (budget, batch), group in grouped(rows, lambda row: (row["budget"], row["batch_size"])).items():
        title = f"decode step, budget {budget:,}, batch {batch}"
        yield simple_table(title, _COLUMNS, map(_line, group), head=2)
        ratios = [(name, _count(context), f"{value:.3f}") for name, context, value in ratio_rows(group)]
        if ratios:
            yield simple_table("step times, median of same-round ratios", ("pair", "context", "x"), ratios, head=2)


def _line(row: Row) -> list[str | None]:
    """What a row is of, and its numbers, or what became of it in place of the first."""
    of = [row["variant"], _count(row["context"])]
    if row["status"] != MEASURED:
        return [*of, row["status"], *[None] * (len(_COLUMNS) - 3)]
    step = row["step_ms"]
    return [
        *of,
        f"{step:.{3 if step < 10 else 2}f}",
        f"{100 * (row['step_ms_highest'] - row['step_ms_lowest']) / step:.0f} %",
        f"{row['tokens_per_second']:,.1f}",
        _percent(row["bandwidth_share"]),
        readable_bytes(row["kv_bytes"]),
        None if row["peak_bytes"] is None else readable_bytes(row["peak_bytes"]),
        _percent(row["cache_share"]),
        _percent(row["eviction_share"]),
    ]


def step_ratio(of: Row | None, to: Row | None) -> float | None:
    """Step times of two rows of one group, round by round."""
    if of is None or to is None or len(of["rounds_ms"]) != len(to["rounds_ms"]):
        return None
    return ratio(of["rounds_ms"], to["rounds_ms"])


def beside(rows: Sequence[Row], row: Row, variant: str, context: int | None) -> Row | None:
    """The row of another variant that was timed in turn with this one."""
    key = BenchKey(variant, context, row["budget"], row["batch_size"])
    return next((other for other in rows if row_key(other) == key and other["status"] == MEASURED), None)


def ratio_rows(rows: Sequence[Row]) -> list[tuple[str, int, float]]:
    """Names, context and step-time ratio of the pairs that were measured in one group."""
    ratios = []
    for of, to in PAIRS:
        for row in rows:
            if row["variant"] == of and row["status"] == MEASURED:
                context = None if to in (FLOOR, FLOOR_COMPILED) else row["context"]
                value = step_ratio(row, beside(rows, row, to, context))
                if value is not None:
                    ratios.append((f"{of} / {to}", row["context"], value))
    return ratios


def reasons(rows: Sequence[Row]) -> list[str]:
    """One sentence for every reason that rows have no numbers, or that their numbers are not what they should be."""
    problems = [(row["variant"], problem, _count(row["context"])) for row in rows if (problem := _problem(row))]
    lines = []
    for (name, problem), mine in grouped(problems, lambda problem: problem[:2]).items():
        contexts = ", ".join(dict.fromkeys(context for *_, context in mine if context))
        lines.append(f"{name}{f' at {contexts}' if contexts else ''} {problem}")
    return lines


def _problem(row: Row) -> str | None:
    if row["status"] != MEASURED:
        return f"{row['status']}: {row['reason']}"
    return f"compiled {row['recompiled']} times more while it was timed" if row.get("recompiled") else None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f} %" if value < 0.02 else f"{100 * value:.1f} %"
