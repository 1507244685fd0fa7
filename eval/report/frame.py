"""Rows as long DataFrames: a record per answered prompt, or per predicted text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pandas import Categorical, DataFrame

from ..caches.budgets import FULL
from ..store.results import Row

#: What tells the lines of a table apart.
LINE = ("run", "budget", "policy")
_NUMBERS = (
    "score budget_tokens prompt_tokens length truncated record_length new_tokens ended repeated identical kl "
    "batch_rows prefill_seconds decode_seconds decode_steps peak_bytes kv_bytes evicted_tokens"
).split()


def long_frame(rows: Iterable[Row], run: str = "", settings: Mapping[str, Any] | None = None) -> DataFrame:
    """Rows over tasks as records, with their costs and their agreement with the full cache as columns.

    `length` is 0 where prompts have their own; `held` says whether a budget was set and nothing evicted, as far as
    lengths tell where nobody counted; numbers that a row does not have are not-a-number. Lines stand in the order of
    the settings, those of the full cache first.
    """
    records = [{**row, **(row.get("agreement") or {}), **(row.get("efficiency") or {})} for row in rows]
    columns = ["task", "policy", "budget", "metadata", *_NUMBERS]
    frame = DataFrame(records, columns=columns, dtype=object).astype(dict.fromkeys(_NUMBERS, float))
    evicted, budgets = frame["evicted_tokens"], frame["budget_tokens"]
    fits = budgets >= frame["prompt_tokens"] + frame["new_tokens"].fillna(0)
    held = budgets.notna() & fits.where(evicted.isna(), evicted == 0)
    return _ordered(frame.assign(run=run, length=frame["length"].fillna(0).astype(int), held=held), settings or {})


def text_frame(rows: Iterable[Row], run: str = "", settings: Mapping[str, Any] | None = None) -> DataFrame:
    """The same of rows over texts: their losses, and the numbers of tokens that these are sums over."""
    columns = ["text", "policy", "budget", "budget_tokens", "tokens", "length", "loss", "count"]
    frame = DataFrame(list(rows), columns=columns, dtype=object)
    held = frame["tokens"].astype(float) <= frame["budget_tokens"].astype(float)
    return _ordered(frame.assign(run=run, held=held), settings or {})


def _ordered(frame: DataFrame, settings: Mapping[str, Any]) -> DataFrame:
    """The frame by budget and policy, then by task and length."""

    def places(column: str, setting: str) -> Any:
        names = dict.fromkeys([*map(str, settings.get(setting) or ()), *frame[column]])
        return Categorical(frame[column], list(names)).codes

    keys = [places("policy", "policies"), places("budget", "budgets"), frame["policy"] != FULL]
    if "task" in frame:
        keys = [frame["length"], places("task", "tasks"), *keys]
    return frame.iloc[np.lexsort(keys)]
