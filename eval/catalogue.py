"""What there is to choose from."""

from __future__ import annotations

from inspect import getdoc

from rich.table import Table

from hf_paged_eviction import available_policies, make_policy

from .tasks import available_tasks, get_task


def policy_lines() -> list[tuple[str, str, str]]:
    """Name, paper and first sentence of every policy."""
    found = []
    for name in available_policies():
        policy = make_policy(name)
        summary = (getdoc(type(policy)) or "").partition("\n\n")[0].replace("\n", " ").replace("`", "")
        found.append((name, f"arXiv {policy.paper}" if policy.paper else "", summary))
    return found


def policy_table() -> Table:
    """The policies, for the terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("score: the lowest goes first")
    for line in policy_lines():
        table.add_row(*line)
    return table


def task_table() -> Table:
    """The tasks, for the terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("what is asked")
    for name in available_tasks():
        table.add_row(name, get_task(name).description)
    return table
