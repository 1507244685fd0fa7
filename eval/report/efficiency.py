"""What answers cost: time, memory, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..store.results import Row
from ..store.summaries.table import Column, Table, Value
from .runs import Run, Variant, prompts_of
from .scores import Line, lines_of, table_of_lines

MIB = 1024 * 1024


@dataclass(frozen=True)
class Cost:
    """Means over answers; None where nothing was measured.

    Attributes:
        prefill, compression: seconds per batch.
        step: seconds per decoding step of a batch.
        rate: tokens of answers but their first per second of decoding, over all rows of a batch.
        cache_share: of the decoding time, spent inside the cache; 0 to 1.
        peak, held: bytes; the most that was taken, and of a row after its answer all that stands for keys and values
            on the model's device, what a disposal keeps there included.
        host: bytes of a row after its answer that a disposal keeps in host memory; None where there are none.
        evicted_tokens, evicted_blocks: per row, summed over layers.
        batch: rows per batch.
    """

    prefill: float | None
    compression: float | None
    step: float | None
    rate: float | None
    cache_share: float | None
    peak: float | None
    held: float | None
    host: float | None
    evicted_tokens: float | None
    evicted_blocks: float | None
    batch: float | None


def cost_of(rows: Iterable[Row]) -> Cost | None:
    """The cost of some answers; None if none of them has one."""
    found = [row for row in rows if row.get("efficiency")]
    if not found:
        return None
    decode, steps = _share(found, "decode_seconds"), _share(found, "decode_steps")
    inside = _share([row for row in found if _get(row, "cache_seconds") is not None], "decode_seconds")
    # The first token comes with the prefill.
    tokens = sum(max((row.get("new_tokens") or 0) - 1, 0) for row in found if _get(row, "decode_seconds") is not None)
    peaks = [peak for row in found if (peak := _get(row, "peak_bytes")) is not None]
    return Cost(
        prefill=_mean(found, "prefill_seconds"),
        compression=_mean(found, "compress_seconds"),
        step=decode / steps if steps else None,
        rate=tokens / decode if decode and tokens else None,
        cache_share=_share(found, "cache_seconds") / inside if inside else None,
        peak=max(peaks, default=None),
        held=_mean(found, "kv_bytes"),
        host=_mean(found, "host_bytes") or None,
        evicted_tokens=_mean(found, "evicted_tokens"),
        evicted_blocks=_mean(found, "evicted_blocks"),
        batch=_mean(found, "batch_rows"),
    )


def _get(row: Row, name: str) -> Any:
    return row["efficiency"].get(name)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := _get(row, name)) is not None]
    return fmean(values) if values else None


def _share(rows: Sequence[Row], name: str) -> float:
    """The sum over batches: every row of a batch has the number of the whole batch, and counts as its part of it."""
    return sum((_get(row, name) or 0) / (_get(row, "batch_rows") or 1) for row in rows)


def lengths_of(run: Run) -> list[int | None]:
    """Lengths of all tasks of a run, ascending; None stands for prompts of their own length."""
    return sorted({row["length"] for row in run.rows}, key=lambda length: length or 0)


def cost_at(run: Run, length: int | None, variant: Variant) -> Cost | None:
    """The cost of one policy and budget, over all tasks of one length."""
    return cost_of(row for task in run.tasks for row in run.of(task, length, variant))


def efficiency_tables(runs: Sequence[Run]) -> list[Table]:
    """One table per length of prompts."""
    lengths = sorted({length for run in runs for length in lengths_of(run)}, key=lambda length: length or 0)
    return [table for length in lengths if (table := _table(runs, length))]


def _table(runs: Sequence[Run], length: int | None) -> Table | None:
    lines = [line for line in lines_of(runs) if cost_at(line.run, length, line.variant)]
    host = host_column(cost_at(line.run, length, line.variant) for line in lines)
    columns: Sequence[tuple[Column, Callable[[Any], float | None]]] = (
        (Column("prefill (s)", 3), lambda cost: cost.prefill),
        (Column("compression (s)", 4), lambda cost: cost.compression),
        (Column("time per token (ms)", 2), lambda cost: scaled(cost.step, 1000)),
        (Column("tokens/s", 1), lambda cost: cost.rate),
        (Column("in the cache (%)", 1), lambda cost: scaled(cost.cache_share, 100)),
        (Column("peak memory (MiB)", 0), lambda cost: scaled(cost.peak, 1 / MIB)),
        (Column("KV held (MiB per row)", 2), lambda cost: scaled(cost.held, 1 / MIB)),
        *((column, lambda cost: scaled(cost.host, 1 / MIB)) for column in host),
        (Column("evicted tokens", 0), lambda cost: cost.evicted_tokens),
        (Column("blocks evicted while answering", 1), lambda cost: cost.evicted_blocks),
        (Column("rows per batch", 1), lambda cost: cost.batch),
    )

    def values(line: Line) -> list[Value]:
        cost = cost_at(line.run, length, line.variant)
        return [of(cost) for _, of in columns]

    size = prompts_of(runs, length)
    name = f"efficiency_{length or 'own'}"
    note = (
        "Seconds are of a batch, evictions of a row and summed over layers. Evicted tokens were read and are no longer "
        "held. Evicted blocks are those that were overwritten one by one while answering; what leaves at once when "
        "the prompt is compressed counts as tokens only, so short answers have few blocks or none. Where a prefill "
        "was shared, prefill is the time of the one that all caches continued from, and compression what this cache "
        "added. KV held is on the model's device, what a disposal keeps there included."
    )
    return table_of_lines(name, f"Efficiency, {size}", lines, [column for column, _ in columns], values, note)


def host_column(costs: Iterable[Cost | None]) -> list[Column]:
    """A column for what lies in host memory, if anything does."""
    return [Column("in host memory (MiB per row)", 2)] if any(cost and cost.host for cost in costs) else []


def scaled(value: float | None, factor: float) -> float | None:
    """The value in another unit."""
    return None if value is None else value * factor
