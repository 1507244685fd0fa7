"""Rows as one long DataFrame: a record per answered prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from pandas import DataFrame, Series

from ..store.results import Row

_TEXTS = "task length policy budget id prediction thinking metadata".split()
_NUMBERS = (
    "score budget_tokens prompt_tokens truncated chat record_length new_tokens ended repeated identical kl batch_rows "
    "prefill_seconds compress_seconds decode_seconds decode_steps cache_seconds peak_bytes kv_bytes host_bytes "
    "evicted_tokens evicted_blocks"
).split()


def long_frame(rows: Iterable[Row], run: str = "") -> DataFrame:
    """What rows over tasks say, what they cost and how they agree with the full cache, side by side.

    `length` is 0 where prompts have their own; `held` says whether a budget was set and nothing evicted; numbers that a
    row does not have are not-a-number.
    """
    records = [
        {**row, **(row.get("agreement") or {}), **(row.get("efficiency") or {})}
        | {"length": row["length"] or 0, "held": nothing_evicted(row), "run": run}
        for row in rows
    ]
    frame = DataFrame(records, dtype=object).reindex(columns=[*_TEXTS, *_NUMBERS, "held", "run"])
    return frame.astype({**dict.fromkeys(_NUMBERS, float), "length": int, "held": bool})


def nothing_evicted(row: Row) -> bool:
    """Whether a budget was set and holds all; as far as lengths tell, where nobody counted."""
    if row["budget_tokens"] is None:
        return False
    if "text" in row:
        return bool(row["tokens"] <= row["budget_tokens"])
    evicted = (row.get("efficiency") or {}).get("evicted_tokens")
    if evicted is None:
        return bool(row["budget_tokens"] >= (row.get("prompt_tokens") or inf) + (row.get("new_tokens") or 0))
    return bool(evicted == 0)


def whole(numbers: Iterable[Any]) -> list[int | None]:
    """Numbers rounded to whole ones; None for those that are none."""
    return [None if number != number else round(number) for number in numbers]


def own_lengths(cells: DataFrame) -> DataFrame:
    """Cells with a length where prompts have one that was asked for."""
    return cells.assign(length=Series([int(length) or "" for length in cells["length"]], cells.index, dtype=object))


def named(cells: DataFrame, by: Sequence[str]) -> DataFrame:
    """Cells under the columns that name their line: a length where prompts have one that was asked for, and no run and
    no length where all would be empty."""
    cells = own_lengths(cells)
    empty = [name for name in ("run", "length") if name in by and not cells[name].map(bool).any()]
    return cells.drop(columns=empty).set_index([name for name in by if name not in empty])
