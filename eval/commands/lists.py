"""`paged-eviction tasks` and `paged-eviction policies`."""

from __future__ import annotations

from rich.console import Console

from .command import LatePlugin, plain_errors, refuse_late_plugins


def tasks(plugin: LatePlugin = None) -> None:
    """List the tasks and the groups that --tasks may name."""
    from .catalogue import task_tables

    with plain_errors():
        refuse_late_plugins(plugin, "tasks")
    Console().print(task_tables())


def policies(plugin: LatePlugin = None) -> None:
    """List the eviction policies, their papers, and what they keep."""
    from .catalogue import policy_tables

    with plain_errors():
        refuse_late_plugins(plugin, "policies")
    Console().print(policy_tables())
