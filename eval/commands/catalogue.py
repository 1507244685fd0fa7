"""What there is to choose from."""

from __future__ import annotations

from inspect import getdoc

from rich.console import Group, RenderableType
from rich.table import Table

from ..tasks import suites


def policy_tables() -> RenderableType:
    """The policies, for the terminal."""
    from hf_paged_eviction import (
        available_allocators,
        available_disposals,
        available_modifiers,
        available_policies,
    )
    from hf_paged_eviction.internals import POLICIES

    table = _table("policies")
    table.add_column()
    kinds = {name: POLICIES.classes[name] for name in available_policies()}
    for name, kind in kinds.items():
        summary = (getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ").replace("`", "")
        table.add_row(name, summary, f"arXiv {kind.paper}" if kind.paper else "")
    notes = (
        "What has the lowest score goes first. --policies all: all that read no profile; full: the full cache. "
        f"Around others: {', '.join(available_modifiers())}, such as caote(h2o). Parameters: snapkv(window=16). "
        f"Budgets that differ between layers or heads: h2o@cake, with {', '.join(available_allocators())}. What "
        f"becomes of evicted tokens (disposal= of the cache): {', '.join(available_disposals())}."
    )
    return Group(table, "", notes)


def task_sections() -> dict[str, dict[str, str]]:
    """Tasks with a line about each, by section; the first word of a section is the group that names all of it."""
    groups = suites.task_groups()
    sections = {
        "suite: generated, what the embedded model was trained for": groups["suite"],
        "ruler: generated at any length": groups["ruler"],
        "niah: generated, a needle at every depth": groups["niah"],
        "all21: LongBench": groups["all21"],
        "e13: LongBench-E, reported by length": groups["e13"],
        "v2: LongBench v2": groups["v2"],
        "ruler_data: RULER's own records": groups["ruler_data"],
        "mathematics: long answers": groups["mathematics"],
    }
    return {title: {task: suites.description(task) for task in tasks} for title, tasks in sections.items()}


def task_tables() -> RenderableType:
    """The tasks, for the terminal, and the groups that are parts of a section."""
    sections = task_sections()
    tables: list[RenderableType] = []
    for title, tasks in sections.items():
        table = _table(title)
        for task, description in tasks.items():
            table.add_row(task, description)
        tables += [table, ""]
    rest = _table("more groups")
    whole = {title.partition(":")[0] for title in sections}
    for name, members in suites.task_groups().items():
        if name not in whole:
            rest.add_row(name, ", ".join(members))
    return Group(*tables, rest)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=22)
    table.add_column()
    return table
