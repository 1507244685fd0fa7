"""What a process does that another one started for a share of its run; imports nothing that takes time."""

from __future__ import annotations

import os
import threading

#: Set for such processes.
VARIABLE = "PAGED_EVICTION_CHILD"


def is_child() -> bool:
    """Whether this process has a share of the run of another one, which shows what was found."""
    return VARIABLE in os.environ


def end_with_parent() -> None:
    """End this process when its parent does: what the system closes with the parent is the standard input."""

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held when the interpreter shuts down
        os._exit(1)

    if is_child():
        threading.Thread(target=wait, daemon=True).start()
