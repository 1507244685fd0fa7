"""Scores by the depth of the needle in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isclose
from typing import Any

from pandas import Series

from ..tables.frame import named
from ..tables.table import Table
from .runs import PLACE, Run, complete, frame_of

DEPTH_BINS = 10
_TITLE = "score in % by the depth of the needle (0 % is the beginning of the prompt)"


def depth_table(runs: Sequence[Run]) -> Table | None:
    """Mean score of all tasks with needles: policies and budgets, per length, by depths."""
    frame = frame_of(runs)
    depths = Series([depth_of(metadata) for metadata in frame["metadata"]], dtype=float).dropna()
    names, name_of = depth_bins(depths)
    frame = complete(frame.loc[depths.index].assign(depth=depths.map(name_of)), PLACE)
    if frame.empty:
        return None
    by = ["run", "length", "budget", "policy"]
    cells = frame.groupby([*by, "depth", "task"])["score"].mean().groupby([*by, "depth"]).mean().unstack("depth")
    scores = (100 * cells.reindex(frame.set_index(by).index.unique(), columns=names)).reset_index()
    tasks = frame["task"].nunique()
    title = f"{f'Mean of {tasks} tasks' if tasks > 1 else frame['task'].iloc[0]}: {_TITLE}"
    return Table("depths", title, named(scores, by), digits=0, best=names)


def depth_of(metadata: Any) -> float | None:
    """How far down the prompt lies what is asked for, from 0 to 1; None if the question is about no place.

    Args:
        metadata: of the row.
    """
    depth = metadata.get("depth") if isinstance(metadata, dict) else None
    return float(depth) if isinstance(depth, (int, float)) and 0 <= depth <= 1 else None


def depth_bins(depths: Iterable[float]) -> tuple[list[str], Callable[[float], str]]:
    """Names of the columns, and the name for a depth in [0, 1].

    As many columns as there are depths, if they are few and whole percents; else ten of a tenth each.
    """
    distinct = sorted(set(depths))
    if len(distinct) <= DEPTH_BINS + 1 and all(isclose(100 * depth, round(100 * depth)) for depth in distinct):
        return [_percent(depth) for depth in distinct], _percent
    names = [f"{100 * at // DEPTH_BINS}-{100 * (at + 1) // DEPTH_BINS}" for at in range(DEPTH_BINS)]
    return names, lambda depth: names[min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)]


def _percent(depth: float) -> str:
    return f"{100 * depth:.3g}"
