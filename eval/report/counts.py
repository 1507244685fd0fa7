"""What a run consists of, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pandas import DataFrame, Series

from ..caches.budgets import FULL
from ..metrics.thinking import UNENDED
from ..store.notes import notes_of
from ..tables.frame import named, whole
from ..tables.table import Table
from .comparison import flat
from .runs import PLACE, Run, Source, Variant, frame_of


@dataclass(frozen=True)
class Gap:
    """Questions that a policy and budget has not answered, though others have."""

    task: str
    length: int
    variant: Variant
    found: int
    expected: int


def expected_variants(run: Run) -> list[Variant]:
    """Policies and budgets that the settings or the rows name."""
    requested: list[Variant] = []
    for source in run.sources:
        budgets, policies = source.named("budgets"), source.named("policies")
        requested += [(FULL, budget) for budget in budgets if budget == FULL]
        requested += [(policy, budget) for policy in policies for budget in budgets if budget != FULL]
    # Folders that complete one another need not have every policy and budget each.
    return list(dict.fromkeys([*run.variants, *(requested if len(run.sources) == 1 else ())]))


def gaps(run: Run) -> list[Gap]:
    """Every policy and budget that lacks answers to questions that another one has answered."""
    incomplete = []
    for (task, length), here in run.frame.groupby(list(PLACE), sort=False):
        expected = here["id"].nunique()
        counts = here.groupby(["policy", "budget"]).size()
        for variant in expected_variants(run):
            if (count := int(counts.get(variant, 0))) < expected:
                incomplete.append(Gap(str(task), int(length), variant, count, expected))
    return incomplete


def unfinished(run: Run) -> list[str]:
    """Sentences about what the settings ask for and the rows do not have."""
    sentences = []
    for source in run.sources:
        absent = [task for task in source.named("tasks") if task not in run.tasks]
        if absent:
            sentences.append(f"{source.folder}: no row yet of {', '.join(absent)}.")
        sentences += _by_meta(source, len(run.rows) + len(run.texts) if len(run.sources) == 1 else None)
    sentences += notes_of(run.rows)
    incomplete = gaps(run)
    if incomplete:
        missing = sum(gap.expected - gap.found for gap in incomplete)
        names = dict.fromkeys(f"{gap.variant[0]} at {gap.variant[1]}" for gap in incomplete)
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
    frame = frame_of(runs)
    if frame.empty:
        return None
    by = ["run", *PLACE]
    questions = frame.drop_duplicates([*by, "id"], keep="last").groupby(by, sort=False)
    answers = frame.assign(
        empty=frame["prediction"].map(lambda text: not text.strip(), na_action="ignore").astype(float),
        unended=frame["thinking"].eq(UNENDED).astype(float).where(frame["thinking"].notna()),
    ).groupby(by, sort=False)
    missing = Series({key: 0 for key in questions.groups}, dtype=object)
    for run in runs:
        for gap in gaps(run):
            missing[run.label, gap.task, gap.length] += gap.expected - gap.found
    tokens = questions["prompt_tokens"]
    columns = {
        "questions": questions.size(),
        "shortest prompt (tokens)": tokens.min(),
        "prompt tokens (mean)": tokens.mean(),
        "longest prompt (tokens)": tokens.max(),
        "truncated": questions["truncated"].sum(min_count=1),
        "in the chat template": questions["chat"].sum(min_count=1),
        "thinking without end": answers["unended"].sum(min_count=1),
        "empty answers": answers["empty"].sum(),
        "missing answers": missing,
    }
    shown = DataFrame(
        {name: Series(whole(values), questions.size().index, dtype=object) for name, values in columns.items()}
    )
    shown = named(shown.reset_index(), by).dropna(axis=1, how="all")
    note = "Truncated: prompts that lost their middle. Empty and missing answers are over all policies and budgets."
    return Table("counts", "Questions and answers", shown, note=note)
