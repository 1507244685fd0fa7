"""What a run consists of, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, MultiIndex, Series, concat

from ..caches.budgets import FULL
from ..metrics.thinking import UNENDED
from ..store.notes import notes_of
from ..tables.frame import named, whole
from ..tables.table import Table
from .comparison import flat
from .runs import PLACE, Run, Source, Variant, frame_of


def expected_variants(run: Run) -> list[Variant]:
    """Policies and budgets that the settings or the rows name."""
    requested: list[Variant] = []
    for source in run.sources:
        budgets, policies = source.named("budgets"), source.named("policies")
        requested += [(FULL, budget) for budget in budgets if budget == FULL]
        requested += [(policy, budget) for policy in policies for budget in budgets if budget != FULL]
    # Folders that complete one another need not have every policy and budget each.
    return list(dict.fromkeys([*run.variants, *(requested if len(run.sources) == 1 else ())]))


def gaps(run: Run) -> Series:
    """Questions that a policy and budget has not answered, though others have, by task, length, policy and budget."""
    questions = run.frame.groupby(list(PLACE), sort=False)["id"].nunique()
    answers = run.frame.groupby([*PLACE, "policy", "budget"]).size()
    places = [(*place, *variant) for place in questions.index for variant in expected_variants(run)]
    index = MultiIndex.from_tuples(places, names=[*PLACE, "policy", "budget"])
    expected = questions.reindex(index.droplevel([2, 3])).to_numpy()
    absent = expected - answers.reindex(index, fill_value=0)
    return absent[absent > 0]


def unfinished(run: Run) -> list[str]:
    """Sentences about what the settings ask for and the rows do not have."""
    sentences = []
    for source in run.sources:
        absent = [task for task in source.named("tasks") if task not in run.tasks]
        if absent:
            sentences.append(f"{source.folder}: no row yet of {', '.join(absent)}.")
        sentences += _by_meta(source, len(run.rows) + len(run.texts) if len(run.sources) == 1 else None)
    sentences += notes_of(run.rows)
    lacking = gaps(run) if run.rows else Series()
    if len(lacking):
        names = dict.fromkeys(f"{policy} at {budget}" for *_, policy, budget in lacking.index)
        shown = ", ".join(list(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        sentences.append(f"{lacking.sum()} answers are missing ({shown}): their scores are over fewer questions.")
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
    by, labels = ["run", *PLACE], [run.label for run in runs if run.rows]
    questions = frame.drop_duplicates([*by, "id"], keep="last").groupby(by, sort=False)
    answers = frame.assign(
        empty=frame["prediction"].map(lambda text: not text.strip(), na_action="ignore").astype(float),
        unended=frame["thinking"].eq(UNENDED).astype(float).where(frame["thinking"].notna()),
    ).groupby(by, sort=False)
    missing = concat([gaps(run).groupby(list(PLACE)).sum() for run in runs if run.rows], keys=labels, names=["run"])
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
        "missing answers": missing.reindex(questions.size().index, fill_value=0),
    }
    shown = DataFrame(
        {name: Series(whole(values), questions.size().index, dtype=object) for name, values in columns.items()}
    )
    shown = named(shown.reset_index(), by).dropna(axis=1, how="all")
    note = "Truncated: prompts that lost their middle. Empty and missing answers are over all policies and budgets."
    return Table("counts", "Questions and answers", shown, note=note)
