"""What a run consists of, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..caches.budgets import FULL
from ..metrics.thinking import UNENDED
from ..store.notes import notes_of
from ..store.results import Row
from ..store.summaries.table import Column, Table, Value, without_empty
from .comparison import flat
from .runs import Run, Source, Variant

_COLUMNS = (
    "run, task, length, questions, shortest prompt (tokens), prompt tokens (mean), longest prompt (tokens), truncated, "
    "in the chat template, thinking without end, empty answers, missing answers"
).split(", ")


@dataclass(frozen=True)
class Gap:
    """Questions that a policy and budget has not answered, though others have."""

    task: str
    length: int | None
    variant: Variant
    found: int
    expected: int


def expected_variants(run: Run) -> list[Variant]:
    """Policies and budgets that the settings or the rows name."""
    asked: list[Variant] = []
    for source in run.sources:
        budgets, policies = source.named("budgets"), source.named("policies")
        asked += [(FULL, budget) for budget in budgets if budget == FULL]
        asked += [(policy, budget) for policy in policies for budget in budgets if budget != FULL]
    # Folders that complete one another need not have every policy and budget each.
    return list(dict.fromkeys([*run.variants, *(asked if len(run.sources) == 1 else ())]))


def gaps(run: Run) -> list[Gap]:
    """Every policy and budget that lacks answers to questions that another one has answered."""
    found = []
    for task in run.tasks:
        for length in run.lengths(task):
            ids = {row["id"] for variant in run.variants for row in run.of(task, length, variant)}
            for variant in expected_variants(run):
                count = len(run.of(task, length, variant))
                if count < len(ids):
                    found.append(Gap(task, length, variant, count, len(ids)))
    return found


def unfinished(run: Run) -> list[str]:
    """Sentences about what the settings ask for and the rows do not have."""
    sentences = []
    for source in run.sources:
        absent = [task for task in source.named("tasks") if task not in run.tasks]
        if absent:
            sentences.append(f"{source.folder}: no row yet of {', '.join(absent)}.")
        sentences += _by_meta(source, len(run.rows) + len(run.texts) if len(run.sources) == 1 else None)
    sentences += notes_of(run.rows)
    found = gaps(run)
    if found:
        missing = sum(gap.expected - gap.found for gap in found)
        names = dict.fromkeys(f"{gap.variant[0]} at {gap.variant[1]}" for gap in found)
        shown = ", ".join(list(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        sentences.append(f"{missing} answers are missing ({shown}): their scores are over fewer questions.")
    return sentences


def _by_meta(source: Source, rows: int | None) -> list[str]:
    """What the last command says of rows that are not there."""
    sentences = []
    wanted = flat(source.meta).get("rows.wanted")
    if rows is not None and isinstance(wanted, int) and rows < wanted:
        sentences.append(f"{source.folder}: {rows} of {wanted} rows are there; the command of the run continues it.")
    notes = source.meta.get("data_notes")
    sentences += [f"{source.folder}: {note}" for note in notes.values()] if isinstance(notes, dict) else []
    failures = source.meta.get("failures")
    for failure in failures if isinstance(failures, list) else ():
        if isinstance(failure, dict):
            sentences.append(f"{source.folder}: {failure.get('rows')} rows failed: {failure.get('reason')}")
    return sentences


def count_table(runs: Sequence[Run]) -> Table | None:
    """Per task and length: questions, truncated prompts, missing answers."""
    columns = tuple(Column(name, 0) for name in _COLUMNS)
    rows = tuple(
        _counts(run, task, length, missing)
        for run in runs
        for missing in [gaps(run)]
        for task in run.tasks
        for length in run.lengths(task)
    )
    if not rows:
        return None
    note = "Truncated: prompts that lost their middle. Empty and missing answers are over all policies and budgets."
    return without_empty(Table("counts", "Questions and answers", columns, rows, note))


def _counts(run: Run, task: str, length: int | None, missing: Sequence[Gap]) -> tuple[Value, ...]:
    rows = [row for variant in run.variants for row in run.of(task, length, variant)]
    questions = {row["id"]: row for row in rows}
    tokens = [row["prompt_tokens"] for row in questions.values() if row.get("prompt_tokens") is not None]
    return (
        run.label or None,
        task,
        length,
        len(questions),
        min(tokens, default=None),
        fmean(tokens) if tokens else None,
        max(tokens, default=None),
        _number(questions.values(), "truncated"),
        _number(questions.values(), "chat"),
        sum(row.get("thinking") == UNENDED for row in rows) if any(row.get("thinking") for row in rows) else None,
        sum(row["prediction"].strip() == "" for row in rows if row.get("prediction") is not None),
        sum(gap.expected - gap.found for gap in missing if (gap.task, gap.length) == (task, length)),
    )


def _number(rows: Iterable[Row], name: str) -> int | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return sum(map(bool, known)) if known else None
