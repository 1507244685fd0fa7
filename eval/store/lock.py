"""One process at a time in a folder of results.

The operating system lets go of the lock of a process that dies, however it dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UserError
from .results import make_folder

NAME = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be.

    Raises:
        UserError: another process holds it.
    """
    make_folder(folder)
    lock = FileLock(folder / NAME)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"another process is writing to {folder}: wait for it, or choose another --output") from None
    except OSError as error:
        raise UserError(f"cannot lock {folder}: {error.strerror or error}; choose another --output") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def held_file(path: Path) -> Iterator[None]:
    """Hold a lock file, or raise what the system says (`Timeout` if another process holds it)."""
    lock = FileLock(path)
    lock.acquire(blocking=False)
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file."""
    if not path.exists():
        return False
    try:
        with held_file(path):
            return False
    except Timeout:
        return True
