"""Find files, read regular ones only, and write them whole or not at all."""

import errno
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed process left there stays
    fcntl = None  # type: ignore[assignment]

#: Longest name of a file, in bytes, that fits into the name of a temporary one.
_LONGEST = 200
#: Longest path in a message.
_SHOWN = 300


def shown(path: str | Path) -> str:
    """A path for messages."""
    text = str(path)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def is_file(path: str | Path) -> bool:
    """`Path.is_file`, which is False for names that no file can have."""
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def existing_file(name: str | Path, kind: str, made_by: str) -> Path:
    """The path of a regular file.

    Args:
        name: a path; `~` is the home directory.
        kind: what it should be, such as "profile".
        made_by: the command that writes such files.

    Raises:
        ValueError: there is no such file, or it is a folder, a device or the like.
    """
    path = Path(name)
    with suppress(RuntimeError):  # there is no home directory
        path = path.expanduser()
    try:
        check_regular(path)
    except (OSError, ValueError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else _reason(error)
        raise ValueError(f"No {kind} {shown(name)}: {reason}. Expected a file that `{made_by}` wrote.") from error
    return path


def check_regular(path: str | Path) -> None:
    """Refuse what cannot be read as a file: opening a pipe would wait for ever.

    Raises:
        ValueError: it is a folder, a pipe, a device or the like.
        OSError: it is not there, or cannot be looked at.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError("it is a folder, not a file" if stat.S_ISDIR(mode) else "it is not a regular file")


@contextmanager
def whole_file(path: str | Path, mode: int = 0o644) -> Iterator[Path]:
    """Context manager: yields a temporary path beside a file, which takes the file's place when the block ends.

    On an error the file stays as it was. A link stays a link: the file that it points to is replaced. Temporary files
    that killed processes left for this file are removed.

    Args:
        mode: permissions of a new file.

    Raises:
        OSError: the file cannot be written, or it is a folder, a device or the like; the message names `path`.
    """
    temporary = None
    try:
        target = _target(path)
        start = _start(target)
        _remove_left(target.parent, start)
        handle, name = tempfile.mkstemp(prefix=start, suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "rb") as held:
            if fcntl is not None:
                fcntl.flock(held, fcntl.LOCK_EX)  # while it is held, the file is not one that was left
            yield temporary
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())
            temporary.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else mode)
            os.replace(temporary, target)
    except OSError as error:
        raise named_error(error, path) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def set_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be used, and warn: it is in the way, and may still be of use to its owner."""
    number = 1
    while (aside := path.with_name(f"{path.name}.unusable{'' if number == 1 else number}")).exists():
        number += 1
    try:
        os.rename(path, aside)
        what = f"set aside as {str(aside)!r}"
    except FileNotFoundError:  # another process did so
        return
    warnings.warn(f"{str(path)!r} cannot be used and is {what}: {reason.removesuffix('.')}.", stacklevel=2)


def _target(path: str | Path) -> Path:
    """The file that is replaced: what a link points to.

    Raises:
        OSError: it is no regular file, or its folder is not there.
    """
    target = Path(os.path.realpath(path))
    try:
        check_regular(target)
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {str(target.parent)!r}") from None
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None
    return target


def _start(target: Path) -> str:
    """The beginning of the names of temporary files for this one."""
    name = target.name
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}."


def _remove_left(folder: Path, start: str) -> None:
    """Remove temporary files that nobody holds."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        random = name.removeprefix(start).removesuffix(".tmp")
        if not (name.startswith(start) and name.endswith(".tmp")) or "." in random:
            continue
        with suppress(OSError), (folder / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / name).unlink(missing_ok=True)


def named_error(error: OSError, path: str | Path) -> OSError:
    """The same error with the path as it was given, in place of a temporary one."""
    if error.errno is None:
        return OSError(f"Cannot write {shown(path)}: {error}")
    return OSError(error.errno, f"Cannot write {shown(path)}: {error.strerror}")


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
