"""`paged-eviction tasks` and `paged-eviction policies`: what there is to choose from."""

from __future__ import annotations

from inspect import getdoc

from rich.console import Console
from rich.table import Table

from ..options.base import Options


def policies(options: Options) -> None:
    """List the eviction policies, their papers, and what they keep."""
    from hf_paged_eviction import available_allocators, available_disposals, available_modifiers, available_policies
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
    Console().print(table, "", notes, sep="\n")


def tasks(options: Options) -> None:
    """List the tasks and the groups that --tasks may name."""
    from ..tasks import suites

    groups = suites.task_groups()
    sections = {  # the first word is the group that names all of it
        "suite: generated, what the embedded model was trained for": groups["suite"],
        "ruler: generated at any length": groups["ruler"],
        "niah: generated, a needle at every depth": groups["niah"],
        "all21: LongBench": groups["all21"],
        "e13: LongBench-E, reported by length": groups["e13"],
        "v2: LongBench v2": groups["v2"],
        "ruler_data: RULER's own records": groups["ruler_data"],
        "mathematics: long answers": groups["mathematics"],
    }
    for title, names in sections.items():
        table = _table(title)
        for name in names:
            table.add_row(name, suites.description(name))
        Console().print(table, "", sep="\n")
    rest = _table("more groups")
    for name in [name for name in groups if not any(title.startswith(f"{name}:") for title in sections)]:
        rest.add_row(name, ", ".join(groups[name]))
    Console().print(rest)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=22)
    table.add_column()
    return table
