"""Runs side by side, where they answered the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..store.summaries.summary import mean_of
from ..store.summaries.table import Column, Table, Value
from .runs import Run, Variant

#: Facts that say how a run went, not what it was.
_OUTCOMES = frozenset({"cache", "complete", "failures", "rows", "seconds"})


def comparison_tables(runs: Sequence[Run]) -> list[Table]:
    """The first run against each of the others: scores over the questions that both answered, and the difference."""
    return [table for number, other in enumerate(runs[1:], 1) if (table := _compare(number, runs[0], other))]


def _compare(number: int, first: Run, other: Run) -> Table | None:
    names = ("task", "length", "budget", "policy", f"{first.label} (%)", f"{other.label} (%)", "difference")
    columns = (*map(Column, names), Column("same answers (%)", 1), Column("questions"))
    rows = tuple(
        row
        for task in first.tasks
        for length in first.lengths(task)
        for variant in first.variants
        if (row := _row(first, other, task, length, variant))
    )
    if not rows:
        return None
    note = f"Difference: {other.label} minus {first.label}, in points, over the questions that both answered."
    title = f"{first.label} against {other.label}"
    breaks = frozenset(at for at in range(1, len(rows)) if rows[at][:3] != rows[at - 1][:3])
    return Table(f"comparison_{number}", title, columns, rows, note, breaks=breaks)


def _row(first: Run, other: Run, task: str, length: int | None, variant: Variant) -> tuple[Value, ...] | None:
    theirs = {row["id"]: row for row in other.of(task, length, variant)}
    pairs = [(row, theirs[row["id"]]) for row in first.of(task, length, variant) if row["id"] in theirs]
    if not pairs:
        return None
    before, after = (mean_of((pair[side]["score"] for pair in pairs), 100) for side in (0, 1))
    difference = mean_of((b["score"] - a["score"] for a, b in pairs), 100)
    known = [(a["prediction"], b.get("prediction")) for a, b in pairs if a.get("prediction") is not None]
    same = mean_of((a == b for a, b in known), 100)
    policy, budget = variant
    return task, length, budget, policy, before, after, difference, same, len(pairs)


def flat(content: Any, name: str = "") -> dict[str, Any]:
    """Nested content with dotted names; lists stay whole."""
    if not isinstance(content, dict) or not content:
        return {name: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def difference_table(runs: Sequence[Run]) -> Table | None:
    """Everything written down about the runs in which they differ: settings, versions, hardware."""
    if len(runs) < 2:
        return None
    facts = [
        flat({name: found for name, found in run.sources[0].meta.items() if name not in _OUTCOMES}) for run in runs
    ]
    every = dict.fromkeys(name for fact in facts for name in fact)
    # Of the data its digest counts: how much of it was read, the rows say.
    names = [name for name in every if name[:6] != "tasks." or name.endswith(".sha256")]
    names = [name for name in names if any(fact.get(name) != facts[0].get(name) for fact in facts[1:])]
    if not names:
        return None
    columns = (Column("what"), *(Column(run.label) for run in runs))
    rows = tuple((name, *(_shown(fact.get(name)) for fact in facts)) for name in names)
    return Table("differences", "Where the runs differ", columns, rows, "As written down by the last command of each.")


def _shown(value: Any) -> str | None:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = str(value)
    return None if value is None else text if len(text) <= 120 else f"{text[:117]}..."
