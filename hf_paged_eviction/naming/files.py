"""Find files by their path."""

from contextlib import suppress
from pathlib import Path


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
        if path.is_file():
            return path
        reason = "it is not a regular file" if path.exists() else "there is no such file"
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        reason = getattr(error, "strerror", None) or str(error)
    shown = str(name) if len(str(name)) <= 300 else f"{str(name)[:300]}..."
    raise ValueError(f"No {kind} {shown!r}: {reason}. Expected a file that `{made_by}` wrote.")
