"""Texts that a user gives a task."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..options.files import read_text


def read_haystack(places: Sequence[str]) -> list[str]:
    """The texts of these files, and of the .txt and .md files in these folders, in the order of their names.

    Raises:
        UserError: there is no such file, one cannot be read, or there is no word in any of them.
    """
    texts = [read_text("--haystack", path) for path in _files(places)]
    if not any(text.strip() for text in texts):
        raise UserError(f"--haystack {', '.join(places)}: no text in there (.txt and .md files of a folder are read)")
    return [text for text in texts if text.strip()]


def haystack_digest(places: Sequence[str]) -> str:
    """SHA-256 of the texts."""
    digest = hashlib.sha256()
    for text in read_haystack(places):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _files(places: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"--haystack {place}: there is no such file or folder")
        files += (
            sorted(path for path in place.glob("*.*") if path.suffix in (".txt", ".md")) if place.is_dir() else [place]
        )
    return files
