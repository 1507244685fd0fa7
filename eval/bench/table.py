"""Tables of a benchmark for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_paged_eviction.naming.sizes import readable_bytes

from ..grouping import grouped
from ..store.results import Row
from ..tables.table import Table, simple_table
from .methods import FLOOR, FLOOR_COMPILED, FULL, FULL_COMPILED, KVPRESS, PAGED, PUBLISHED_WHERE, STATIC, published
from .rows import DECODE, MEASURED, PREFILL, THROUGHPUT, BenchKey, ratio, row_key

#: Which step times are divided by which; for the floors the context is None.
PAIRS = (
    (PAGED, FLOOR),
    *((name, FLOOR_COMPILED) for name in STATIC),
    (FULL, PAGED),
    *((FULL, name) for name in STATIC),
    *((FULL_COMPILED, name) for name in STATIC),
    (KVPRESS, PAGED),
)
Columns = Mapping[str, Callable[[Row], Any]]


def tables(rows: Sequence[Row], model: str) -> Iterator[Table]:
    """All tables of a run; empty ones are left out.

    Args:
        model: its name; the paper's own numbers stand beside the shapes that it measured.
    """
    kinds = grouped(rows, lambda row: row["kind"])
    decoded = grouped(kinds.get(DECODE, ()), lambda row: (row["budget"], row["batch_size"]))
    for (budget, batch), group in decoded.items():
        title = f"decode step, budget {budget:,}, batch {batch}"
        yield _table(title, group, {"variant": "variant", "context": "context"}, _STEP)
        ratios = [(name, _count(context), f"{value:.3f}") for name, context, value in ratio_rows(group)]
        if ratios:
            yield simple_table("step times, median of same-round ratios", ("pair", "context", "x"), ratios, head=2)
    if answers := kinds.get(THROUGHPUT):
        yield _answers(answers, model)
    if prompts := kinds.get(PREFILL):
        names = {"read by": "variant", "tokens": "context"}
        yield _table("time to the first token", prompts, names, _prompt_columns(prompts))


def _table(title: str, rows: Sequence[Row], names: Mapping[str, str], columns: Columns, note: str = "") -> Table:
    """A line per row: what it is of, and its numbers, or what became of it in place of the first."""
    lines = []
    for row in rows:
        measured = row["status"] == MEASURED
        cells = [show(row) if measured else None for show in columns.values()]
        of = [row[name] if isinstance(row[name], str) else _count(row[name]) for name in names.values()]
        lines.append([*of, *(cells if measured else [row["status"], *cells[1:]])])
    return simple_table(title, [*names, *columns], lines, note, head=2)


_STEP: Columns = {
    "ms": lambda row: f"{row['step_ms']:.{3 if row['step_ms'] < 10 else 2}f}",
    "spread": lambda row: f"{100 * (row['step_ms_highest'] - row['step_ms_lowest']) / row['step_ms']:.0f} %",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "limit": lambda row: _percent(row["bandwidth_share"]),
    "KV held": lambda row: _size(row.get("kv_bytes")),
    "peak": lambda row: _size(row.get("peak_bytes")),
    "cache": lambda row: _percent(row.get("cache_share")),
    "eviction": lambda row: _percent(row.get("eviction_share")),
}


def _answers(rows: Sequence[Row], model: str) -> Table:
    measured = [row for row in rows if row["status"] == MEASURED]
    full: Row = next((row for row in measured if row["variant"] == FULL), {})
    rate, seconds = "tokens_per_second", "latency_seconds"
    columns: Columns = {
        "rows together": lambda row: row["rows_together"],
        "compiled": lambda row: "yes" if row["compiled"] else "no",
        "tokens/s": lambda row: f"{row[rate]:,.1f}",
        "rate / full": lambda row: f"{row[rate] / full[rate]:.2f}" if full else None,
        "answer, s": lambda row: f"{row[seconds]:.2f}",
        "answer / full": lambda row: f"{row[seconds] / full[seconds]:.2f}" if full else None,
        "ms/token": lambda row: f"{row['token_ms']:.2f}",
        "published": lambda row: f"about {value:,}" if (value := published(model, row)) else None,
    }
    title = "throughput"
    for one in measured[:1]:
        title += f": {one['requests']} requests, {one['input_tokens']:,} tokens in and {one['output_tokens']:,} out"
    note = f"published, tokens/s: {PUBLISHED_WHERE}" if any(published(model, row) for row in measured) else ""
    names = {"variant": "variant", "budget": "budget"}
    return _table(f"{title}, prefill included", rows, names, columns, note)


def _prompt_columns(rows: Sequence[Row]) -> Columns:
    measured = [row for row in rows if row["status"] == MEASURED]
    full = {row["context"]: row["seconds"] for row in measured if (row["cache"], row["chunk"]) == (FULL, None)}
    return {
        "s": lambda row: f"{row['seconds']:.3g}",
        "CPU s": lambda row: f"{row['cpu_seconds']:.3g}",
        "full / this": lambda row: f"{full[row['context']] / row['seconds']:.2f}" if row["context"] in full else None,
    }


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
        return f"{row['status']}: {row['reason']}"
    return f"compiled {row['recompiled']} times more while it was timed" if row.get("recompiled") else None


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _size(value: int | None) -> str | None:
    return None if value is None else readable_bytes(value)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f} %" if value < 0.02 else f"{100 * value:.1f} %"
