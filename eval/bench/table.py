"""Tables of a benchmark for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_paged_eviction.naming.sizes import readable_bytes

from ..grouping import grouped
from ..store.results import Row
from ..tables.table import Table, simple_table
from .methods import PUBLISHED_WHERE, published
from .rows import DECODE, MEASURED, PREFILL, THROUGHPUT, BenchKey, row_key
from .timing import ratio
from .variants import FLOOR, FLOOR_COMPILED, FULL, FULL_COMPILED, KVPRESS, PAGED, STATIC

#: Which step times are divided by which; for the floors the context is None.
PAIRS = (
    (PAGED, FLOOR),
    *((name, FLOOR_COMPILED) for name in STATIC),
    (FULL, PAGED),
    *((FULL, name) for name in STATIC),
    *((FULL_COMPILED, name) for name in STATIC),
    (KVPRESS, PAGED),
)
_WORDS = {"unavailable": "not available"}


def tables(rows: Sequence[Row], model: str) -> list[Table]:
    """All tables of a run; empty ones are left out.

    Args:
        model: its name; the paper's own numbers stand beside the shapes that it measured.
    """
    kinds = grouped(rows, lambda row: row["kind"])
    all_tables: list[Table] = []
    for (budget, batch), group in grouped(
        kinds.get(DECODE, ()), lambda row: (row["budget"], row["batch_size"])
    ).items():
        all_tables += _steps(group, f"decode step, budget {budget:,}, batch {batch}")
    all_tables += _throughput(kinds.get(THROUGHPUT, []), model)
    all_tables += _prefill(kinds.get(PREFILL, []))
    return all_tables


def _steps(rows: Sequence[Row], title: str) -> Iterator[Table]:
    names = ("variant", "context", "ms", "spread", "tokens/s", "limit", "KV held", "peak", "cache", "eviction")
    yield simple_table(title, names, ([row["variant"], _count(row["context"]), *_step(row)] for row in rows), head=2)
    ratios = [(name, _count(context), f"{value:.3f}") for name, context, value in ratio_rows(rows)]
    if ratios:
        yield simple_table("step times, median of same-round ratios", ("pair", "context", "x"), ratios, head=2)


def _step(row: Row) -> list[str | None]:
    if row["status"] != MEASURED:
        return [_status(row), *[None] * 7]
    return [
        f"{row['step_ms']:.{3 if row['step_ms'] < 10 else 2}f}",
        f"{100 * (row['step_ms_highest'] - row['step_ms_lowest']) / row['step_ms']:.0f} %",
        f"{row['tokens_per_second']:,.1f}",
        *(_percent(row["bandwidth_share"]), _size(row.get("kv_bytes")), _size(row.get("peak_bytes"))),
        *(_percent(row.get("cache_share")), _percent(row.get("eviction_share"))),
    ]


def _throughput(rows: Sequence[Row], model: str) -> Iterator[Table]:
    measured = [row for row in rows if row["status"] == MEASURED]
    full = next((row for row in measured if row["variant"] == FULL), None)
    title = "throughput"
    for one in measured[:1]:
        title += f": {one['requests']} requests, {one['input_tokens']:,} tokens in and {one['output_tokens']:,} out"
    names = (
        "rows together",
        "compiled",
        "tokens/s",
        "rate / full",
        "answer, s",
        "answer / full",
        "ms/token",
        "published",
    )
    lines = [[row["variant"], _count(row["budget"]), *_answers(row, full, model)] for row in rows]
    note = f"published, tokens/s: {PUBLISHED_WHERE}" if any(published(model, row) for row in measured) else ""
    if rows:
        yield simple_table(f"{title}, prefill included", ("variant", "budget", *names), lines, note, head=2)


def _answers(row: Row, full: Row | None, model: str) -> list[Any]:
    if row["status"] != MEASURED:
        return [_status(row), *[None] * 7]

    def of_full(name: str) -> str | None:
        return None if full is None else f"{row[name] / full[name]:.2f}"

    rate, seconds, published_rate = "tokens_per_second", "latency_seconds", published(model, row)
    return [
        *(row["rows_together"], "yes" if row["compiled"] else "no"),
        *(f"{row[rate]:,.1f}", of_full(rate), f"{row[seconds]:.2f}", of_full(seconds), f"{row['token_ms']:.2f}"),
        None if published_rate is None else f"about {published_rate:,}",
    ]


def _prefill(rows: Sequence[Row]) -> Iterator[Table]:
    measured = [row for row in rows if row["status"] == MEASURED]
    full = {row["context"]: row["seconds"] for row in measured if (row["cache"], row["chunk"]) == (FULL, None)}

    def cells(row: Row) -> list[str | None]:
        if row["status"] != MEASURED:
            return [_status(row), None, None]
        whole = full.get(row["context"])
        times = [f"{row[name]:.3g}" for name in ("seconds", "cpu_seconds")]
        return [*times, None if whole is None else f"{whole / row['seconds']:.2f}"]

    lines = [[row["variant"], _count(row["context"]), *cells(row)] for row in rows]
    if rows:
        yield simple_table("time to the first token", ("read by", "tokens", "s", "CPU s", "full / this"), lines, head=2)


# ---- ratios and reasons ---------------------------------------------------------------------------------------------


def step_ratio(of: Row | None, to: Row | None) -> float | None:
    """Step times of two rows of one group, round by round."""
    if of is None or to is None or len(of["rounds_ms"]) != len(to["rounds_ms"]):
        return None
    return ratio(of["rounds_ms"], to["rounds_ms"])


def beside(rows: Sequence[Row], row: Row, variant: str, context: int | None) -> Row | None:
    """The row of another variant that was timed in turn with this one."""
    key = BenchKey(DECODE, variant, context, row["budget"], row["batch_size"])
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
        return f"{_status(row)}: {row['reason']}"
    return f"compiled {row['recompiled']} times more while it was timed" if row.get("recompiled") else None


def _status(row: Row) -> str:
    return _WORDS.get(row["status"], str(row["status"]))


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _size(value: int | None) -> str | None:
    return None if value is None else readable_bytes(value)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f} %" if value < 0.02 else f"{100 * value:.1f} %"
