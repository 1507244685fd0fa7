"""Tables of a benchmark for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_paged_eviction.naming.sizes import readable_bytes

from ..store.results import Row
from ..store.summaries.table import Table, simple_table, without_empty
from .methods import PUBLISHED_WHERE, published
from .rows import DECODE, MEASURED, PREFILL, THROUGHPUT, measured
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


def tables(rows: Sequence[Row], model: str) -> list[Table]:
    """All tables of a run; empty ones are left out.

    Args:
        model: its name; the paper's own numbers stand beside the shapes that it measured.
    """
    groups = dict.fromkeys((row["budget"], row["batch_size"]) for row in rows if row["kind"] == DECODE)
    found: list[Table] = []
    for budget, batch in groups:
        group = [row for row in rows if (row["kind"], row["budget"], row["batch_size"]) == (DECODE, budget, batch)]
        found += [_times(group, f"decode step, budget {budget:,}, batch {batch}"), _costs(group), _ratios(group)]
    found += [_throughput([row for row in rows if row["kind"] == THROUGHPUT], model)]
    found += [_prefill([row for row in rows if row["kind"] == PREFILL])]
    return [table for table in found if table.rows]


def _times(rows: Sequence[Row], title: str) -> Table:
    def numbers(row: Row) -> tuple[str | None, ...]:
        if row["status"] != MEASURED:
            return (_WORDS.get(row["status"], row["status"]), "", "", "")
        spread = (row["step_ms_highest"] - row["step_ms_lowest"]) / row["step_ms"]
        step = f"{row['step_ms']:.{3 if row['step_ms'] < 10 else 2}f}"
        return step, f"{100 * spread:.0f} %", f"{row['tokens_per_second']:,.1f}", _percent(row["bandwidth_share"])

    names = ("variant", "context", "ms", "spread", "tokens/s", "limit")
    return simple_table(title, names, ((row["variant"], _context(row), *numbers(row)) for row in rows))


def _costs(rows: Sequence[Row]) -> Table:
    """Memory, and shares of the time, of what was measured."""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "KV held": ("kv_bytes", readable_bytes),
        "peak": ("peak_bytes", readable_bytes),
        "cache": ("cache_share", _percent),
        "eviction": ("eviction_share", _percent),
    }
    lines = [[None if row.get(name) is None else show(row[name]) for name, show in columns.values()] for row in rows]
    known = [(row["variant"], _context(row), *cells) for row, cells in zip(rows, lines, strict=True) if any(cells)]
    return without_empty(simple_table("memory, and shares of the step", ("variant", "context", *columns), known))


def _context(row: Row) -> str:
    return "" if row["context"] is None else f"{row['context']:,}"


def step_ratio(of: Row | None, to: Row | None) -> float | None:
    """Step times of two rows of one group, round by round."""
    if of is None or to is None or len(of["rounds_ms"]) != len(to["rounds_ms"]):
        return None
    return ratio(of["rounds_ms"], to["rounds_ms"])


def beside(rows: Sequence[Row], row: Row, variant: str, context: int | None) -> Row | None:
    """The row of another variant that was timed in turn with this one."""
    return measured(rows, DECODE, variant, context, row["budget"], row["batch_size"])


def ratio_rows(rows: Sequence[Row]) -> list[tuple[str, int, float]]:
    """Names, context and step-time ratio of the pairs that were measured in one group."""
    found = []
    for of, to in PAIRS:
        for row in rows:
            if row["variant"] != (of if of not in (FLOOR, FLOOR_COMPILED) else to) or row["status"] != MEASURED:
                continue
            context = None if to in (FLOOR, FLOOR_COMPILED) else row["context"]
            value = step_ratio(row, beside(rows, row, to, context))
            if value is not None:
                found.append((f"{of} / {to}", row["context"], value))
    return found


def _ratios(rows: Sequence[Row]) -> Table:
    lines = ((name, f"{context:,}", f"{value:.3f}") for name, context, value in ratio_rows(rows))
    return simple_table("step times, median of same-round ratios", ("", "context", "x"), lines)


def _throughput(rows: Sequence[Row], model: str) -> Table:
    known = [row for row in rows if row["status"] == MEASURED]
    title, full = "throughput", next((row for row in known if row["variant"] == FULL), None)
    if known:
        one = known[0]
        title = (
            f"throughput: {one['requests']} requests, {one['input_tokens']:,} tokens in and "
            f"{one['output_tokens']:,} out, prefill included"
        )
    numbers = "rows together", "compiled", "tokens/s", "x full", "answer, s", "x full", "ms/token", "published"
    lines = (
        (
            row["variant"],
            "" if row["budget"] is None else f"{row['budget']:,}",
            *([row["status"], *[""] * 7] if row["status"] != MEASURED else _answers(row, full, model)),
        )
        for row in rows
    )
    note = f"published, tokens/s: {PUBLISHED_WHERE}" if any(published(model, row) for row in known) else ""
    return simple_table(title, ("variant", "budget", *numbers), lines, note)


def _answers(row: Row, full: Row | None, model: str) -> list[str]:
    def beside(name: str) -> str:
        return "" if full is None else f"{row[name] / full[name]:.2f}"

    known = published(model, row)
    return [
        str(row["rows_together"]),
        "yes" if row["compiled"] else "no",
        f"{row['tokens_per_second']:,.1f}",
        beside("tokens_per_second"),
        f"{row['latency_seconds']:.2f}",
        beside("latency_seconds"),
        f"{row['token_ms']:.2f}",
        "" if known is None else f"about {known:,}",
    ]


def _prefill(rows: Sequence[Row]) -> Table:
    known = [row for row in rows if row["status"] == MEASURED]
    full = {row["context"]: row["seconds"] for row in known if (row["cache"], row["chunk"]) == (FULL, None)}

    def numbers(row: Row) -> tuple[str, ...]:
        if row["status"] != MEASURED:
            return row["status"], "", ""
        whole = full.get(row["context"])
        return (
            f"{row['seconds']:.3g}",
            f"{row['cpu_seconds']:.3g}",
            "" if whole is None else f"{whole / row['seconds']:.2f}",
        )

    lines = ((row["variant"], _context(row), *numbers(row)) for row in rows)
    return simple_table("time to the first token", ("read by", "tokens", "s", "CPU s", "full / this"), lines)


def reasons(rows: Sequence[Row]) -> list[str]:
    """One sentence for every reason that rows have no numbers, or that their numbers are not what they should be."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != MEASURED:
            problem = f"{_WORDS.get(row['status'], row['status'])}: {row['reason']}"
        elif row.get("recompiled"):
            problem = f"compiled {row['recompiled']} times more while it was timed"
        else:
            continue
        found.setdefault((row["variant"], problem), []).append(_context(row))
    return [f"{name}{_at(contexts)} {problem}" for (name, problem), contexts in found.items()]


def _at(contexts: Sequence[str]) -> str:
    shown = ", ".join(dict.fromkeys(filter(None, contexts)))
    return f" at {shown}" if shown else ""


_WORDS = {"unavailable": "not available"}


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %" if value < 0.02 else f"{100 * value:.1f} %"
