"""Entry point of the command `paged-eviction`."""

from __future__ import annotations

import sys

from .running.processes.child import end_with_parent

NEEDS_EXTRA = frozenset("accelerate datasets evaluate matplotlib pandas pydantic rich yaml".split())


def main() -> None:
    """Run the command line, or say in one line how to install what it needs."""
    end_with_parent()
    try:
        from .commands import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name not in NEEDS_EXTRA:
            raise
        sys.exit(f"paged-eviction needs {error.name}: pip install 'hf_paged_eviction[eval]'")
