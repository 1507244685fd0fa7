"""`paged-eviction tasks` and `paged-eviction policies`."""

from __future__ import annotations

from rich.console import Console

from ..options.base import Options


def tasks(options: Options) -> None:
    """List the tasks and the groups that --tasks may name."""
    from .catalogue import task_tables

    Console().print(task_tables())


def policies(options: Options) -> None:
    """List the eviction policies, their papers, and what they keep."""
    from .catalogue import policy_tables

    Console().print(policy_tables())
