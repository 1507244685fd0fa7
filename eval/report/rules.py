"""How to read the numbers: only the rules behind what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.longbench.tasks import TASKS
from ..data.longbench.v2 import NAME as V2
from .depths import depth_of
from .runs import Run

#: By paragraph: what has to be shown, the term, and its explanation.
_TEXTS = Path(__file__).parent / "pages" / "templates" / "rules.txt"


def rules(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Terms and their explanations."""
    rows = [row for run in runs for row in run.rows]
    tasks = {task for run in runs for task in run.tasks}
    shown = {
        "rows": bool(rows),
        "longbench": any(task in TASKS for task in tasks),
        "v1": any(task in TASKS and not TASKS[task].is_e for task in tasks),
        "e": any(task in TASKS and TASKS[task].is_e for task in tasks),
        "v2": V2 in tasks,
        "needles": any(depth_of(row.get("metadata")) is not None for run in runs for row in run.rows),
        "agreement": any(row.get("agreement") for row in rows),
        "efficiency": any(row.get("efficiency") for row in rows),
        "texts": any(run.texts for run in runs),
        "any": True,
        "several": len(runs) > 1,
    }
    places = {"question": _question(runs)}
    paragraphs = [text.partition("\n") for text in _TEXTS.read_text("utf-8").split("\n\n")]
    return [
        (term, " ".join(text.split()).format(**places))
        for head, _, text in paragraphs
        for what, term in [head.split(" | ")]
        if shown[what]
    ]


def _question(runs: Sequence[Run]) -> str:
    settings = [source.settings for run in runs for source in run.sources]
    stated = {bool(run["question_aware"]) for run in settings if run.get("question_aware") is not None}
    stated |= {bool(row["question_aware"]) for run in runs for row in run.rows if row.get("question_aware") is not None}
    aware = "the question stood in the prompt when the cache was compressed, as in the papers"
    agnostic = "the cache was compressed before the question was read"
    if stated == {True}:
        return f"In this report {aware}."
    if stated == {False}:
        return f"In this report {agnostic}."
    return f"Question-aware runs: {aware}. Question-agnostic runs: {agnostic}. Their scores cannot be compared."
