"""What a run lacks."""

from __future__ import annotations

from pandas import MultiIndex, Series

from ..caches.budgets import FULL
from ..store.notes import notes_of
from .runs import PLACE, Run, Source, Variant


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
    wanted = source.meta.get("rows", {}).get("wanted", 0)
    if rows is not None and rows < wanted:
        sentences.append(f"{source.folder}: {rows} of {wanted} rows are there; the command of the run continues it.")
    sentences += [f"{source.folder}: {note}" for note in source.meta.get("data_notes", {}).values()]
    failures = source.meta.get("failures", [])
    return sentences + [f"{source.folder}: {one['rows']} rows failed: {one['reason']}" for one in failures]
