"""Rows as one long DataFrame: a record per answered prompt."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from pandas import DataFrame

from ..store.results import Row

_TEXTS = "task length policy budget id prediction thinking metadata".split()
_NUMBERS = (
    "score budget_tokens prompt_tokens truncated chat record_length new_tokens ended repeated identical kl batch_rows "
    "prefill_seconds decode_seconds decode_steps peak_bytes kv_bytes evicted_tokens"
).split()


def long_frame(rows: Iterable[Row], run: str = "") -> DataFrame:
    """Rows over tasks as records, with their costs and their agreement with the full cache as columns.

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
