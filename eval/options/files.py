"""Texts that are given as files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError


def read_text(option: str, path: Path) -> str:
    """The text of a file, without a byte order mark.

    Raises:
        UserError: it cannot be read as UTF-8; names the option and the line.
    """
    try:
        content = path.expanduser().read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise UserError(f"{option} {path}, line {line}: cannot be read: it is not text in UTF-8") from error


def check_files(files: Iterable[Path]) -> None:
    """Refuse files that are not there."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise UserError(f"no such file: {', '.join(missing)}")


def check_output(output: Path, suffix: str = ".safetensors") -> None:
    """Refuse, before anything is computed, a file that could not be written, or that has another suffix."""
    if output.suffix != suffix:
        raise UserError(f"--output {output}: the name of the file ends in {suffix}")
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the path of a file")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}; create it first")
