"""How to read the numbers: only the rules behind what is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from .runs import Run

#: By paragraph: the section or table that has to be shown, the term, and its explanation.
_TEXTS = Path(__file__).parent / "pages" / "templates" / "rules.txt"


def rules(runs: Sequence[Run], shown: Collection[str]) -> list[tuple[str, str]]:
    """Terms and their explanations.

    Args:
        shown: names of sections and tables.
    """
    paragraphs = [text.partition("\n") for text in _TEXTS.read_text("utf-8").split("\n\n")]
    rules = [(*head.split(" | "), " ".join(text.split())) for head, _, text in paragraphs]
    return [
        (term, text.format(question=_question(runs)))
        for where, term, text in rules
        if where == "any" or any(name.startswith(where) for name in shown)
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
