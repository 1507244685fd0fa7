"""One process at a time for a file of a run.

The operating system lets go of the lock of a process that dies, however it dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UserError

#: Seconds to wait for a file that one process holds as long as it lives: another may only look whether it is held.
BRIEFLY = 1.0
#: Seconds to wait for a file that all write and nobody holds for long.
PATIENTLY = 120.0


@contextmanager
def held(path: Path, seconds: float = BRIEFLY) -> Iterator[None]:
    """Hold a file, which need not be there yet; its folder must.

    Raises:
        UserError: another process holds it.
    """
    lock, folder = FileLock(_beside(path)), path.parent
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise UserError(f"another process is writing to {folder}: wait for it, or choose another --output") from None
    except OSError as error:
        raise UserError(f"cannot lock {folder}: {error.strerror or error}; choose another --output") from error
    try:
        yield
    finally:
        lock.release()


def held_elsewhere(rows: Path) -> bool:
    """Whether some process holds another file of rows in this folder."""
    for path in set(rows.parent.glob(".*.jsonl.lock")) - {_beside(rows)}:
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
