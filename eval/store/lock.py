"""One process at a time for a file of rows, and for what all processes of a run write.

The operating system lets go of the lock of a process that dies, however it dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UserError

#: Seconds to wait for a file of rows: others only look whether it is held, and a killed process takes a moment to end.
PATIENCE = 1.0
#: Seconds to wait for the files that all write, which nobody holds for long.
LONG_PATIENCE = 120.0


@contextmanager
def held(rows: Path) -> Iterator[None]:
    """Hold a file of rows, which need not be there yet; its folder must.

    Raises:
        UserError: another process holds it.
    """
    with _locked(FileLock(_beside(rows)), PATIENCE):
        yield


def held_elsewhere(rows: Path) -> bool:
    """Whether some process holds another file of rows in this folder."""
    return any(_is_taken(path) for path in rows.parent.glob(".*.jsonl.lock") if path != _beside(rows))


def _is_taken(path: Path) -> bool:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def shared(folder: Path) -> FileLock:
    """The lock of what all processes of a folder write; for `alone`."""
    return FileLock(folder / ".lock")


@contextmanager
def alone(lock: FileLock) -> Iterator[None]:
    """Hold the lock for a moment; whoever has it may ask again."""
    with _locked(lock, LONG_PATIENCE):
        yield


@contextmanager
def _locked(lock: FileLock, seconds: float) -> Iterator[None]:
    folder = Path(lock.lock_file).parent
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


def _beside(rows: Path) -> Path:
    return rows.with_name(f".{rows.name}.lock")
