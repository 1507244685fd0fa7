"""Runs side by side, where they answered the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pandas import DataFrame

from ..tables.frame import own_lengths
from ..tables.means import means
from ..tables.table import Table
from .runs import Run

#: Facts that say how a run went, not what it was.
_OUTCOMES = frozenset({"complete", "failures", "rows", "seconds"})
_BY = ["task", "length", "budget", "policy"]


def comparison_tables(runs: Sequence[Run]) -> list[Table]:
    """The first run against each of the others: scores over the questions that both answered, and the difference."""
    return [table for number, other in enumerate(runs[1:], 1) if (table := _compare(number, runs[0], other))]


def _compare(number: int, first: Run, other: Run) -> Table | None:
    other_rows = other.frame[[*_BY, "id", "score", "prediction"]]
    pairs = first.frame.drop(columns="held").merge(other_rows, on=[*_BY, "id"], suffixes=("", "_other"))
    if pairs.empty:
        return None
    pairs["difference"] = pairs["score_other"] - pairs["score"]
    pairs["same"] = (pairs["prediction"] == pairs["prediction_other"]).astype(float).where(pairs["prediction"].notna())
    columns = {
        f"{first.label} (%)": means(pairs, _BY, "score", 100),
        f"{other.label} (%)": means(pairs, _BY, "score_other", 100),
        "difference": means(pairs, _BY, "difference", 100),
        "same answers (%)": means(pairs, _BY, "same", 100),
        "questions": pairs.groupby(_BY, sort=False).size(),
    }
    frame = own_lengths(DataFrame(columns, dtype=object).reset_index())
    note = f"Difference: {other.label} minus {first.label}, in points, over the questions that both answered."
    title = f"{first.label} against {other.label}"
    return Table(f"comparison_{number}", title, frame.set_index(_BY), {"same answers (%)": 1}, note)


def flat(content: Any, name: str = "") -> dict[str, Any]:
    """Nested content with dotted names; lists stay whole."""
    if not isinstance(content, dict) or not content:
        return {name: content}
    flattened: dict[str, Any] = {}
    for key, value in content.items():
        flattened |= flat(value, f"{name}.{key}" if name else str(key))
    return flattened


def difference_table(runs: Sequence[Run]) -> Table | None:
    """Everything written down about the runs in which they differ: settings, versions, hardware."""
    facts = [
        flat({name: setting for name, setting in run.sources[0].meta.items() if name not in _OUTCOMES}) for run in runs
    ]
    every = dict.fromkeys(name for fact in facts for name in fact)
    # Of the data its digest counts: how much of it was read, the rows say.
    names = [name for name in every if name[:6] != "tasks." or name.endswith(".sha256")]
    lines = {name: [_shown(fact.get(name)) for fact in facts] for name in names}
    lines = {name: values for name, values in lines.items() if any(value != values[0] for value in values)}
    if not lines:
        return None
    frame = DataFrame.from_dict(lines, orient="index", columns=[run.label for run in runs], dtype=object)
    note = "As written down by the last command of each."
    return Table("differences", "Where the runs differ", frame.rename_axis("what"), note=note)


def _shown(value: Any) -> str | None:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = str(value)
    return None if value is None else text if len(text) <= 120 else f"{text[:117]}..."
