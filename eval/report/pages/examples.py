"""A few predictions to look at: where a policy lost most against the full cache, and where it won."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...caches.budgets import FULL
from ...store.results import Row
from ..runs import Run

#: Characters of a text that are shown.
CUT = 400
WORST, BEST = 2, 1


class Example(NamedTuple):
    """One answer beside the full cache's, if that ran; `prompt` is None if it was not logged."""

    kind: str
    row: Row
    full: Row | None
    prompt: str | None


def examples(run: Run, task: str) -> list[Example]:
    """The largest losses and gains of a task, no question twice; without a full cache the lowest and highest scores."""
    rows = [row for row in run.rows if row["task"] == task and row.get("prediction") is not None]
    others = [row for row in rows if row["policy"] != FULL]
    full = {(row["length"], row["id"]): row for row in rows if others and row["policy"] == FULL}
    others = others or rows

    def gain(row: Row) -> float:
        other = full.get((row["length"], row["id"]))
        return float(row["score"]) - (float(other["score"]) if other else 0.0)

    ranked = sorted(others, key=lambda row: (gain(row), row["policy"], row["budget"], row["id"]))
    losses = [row for row in ranked if gain(row) < 0 or not full]
    gains = [row for row in reversed(ranked) if gain(row) > 0]
    worst = _distinct(losses, WORST)
    best = _distinct(gains, BEST, {row["id"] for row in worst})
    picked = [("worst", row) for row in worst] + [("best", row) for row in best]
    picked = picked or [("as the full cache", row) for row in others[:1]]
    return [
        Example(
            kind,
            row,
            full.get((row["length"], row["id"])),
            ends(run.prompts.get((task, row["length"], row["id"]))),
        )
        for kind, row in picked
    ]


def _distinct(rows: Sequence[Row], count: int, seen: Collection[str] = ()) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["id"], row)
    return [row for name, row in first.items() if name not in seen][:count]


def ends(text: str | None, most: int = CUT) -> str | None:
    """The beginning and the end of a prompt: the question stands at its end."""
    if text is None or len(text) <= 3 * most:
        return text
    return f"{text[:most]}\n… ({len(text)} characters) …\n{text[-2 * most :]}"


def cut(text: object, most: int = CUT) -> str:
    """The beginning of a text."""
    text = str(text).strip()
    return text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"
