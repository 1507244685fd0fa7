"""The first steps of a child process: it watches its parent before it imports anything that takes time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection


def begin(pipe: Connection) -> None:
    """Receive what to do from the parent, and do it until it is done, or there is no parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work, arguments = pipe.recv()  # imports the modules that they are from, torch among them
    except EOFError:
        return
    work(pipe, *arguments)


def _end_with_parent() -> None:
    # A parent that is killed closes no pipe while its child computes, and the child would go on for nobody. What the
    # system closes with the parent, and only then, is the end of another pipe, which this waits for.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
