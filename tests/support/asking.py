"""What a run over tasks is asked."""

from typing import Any

from hf_paged_eviction_eval.options.settings import TaskSettings


def asked(task: str = "passkey", **changes: Any) -> TaskSettings:
    """The full cache alone answers one task."""
    return TaskSettings(**{"policies": (), "budgets": ("full",), "tasks": (task,), **changes})
