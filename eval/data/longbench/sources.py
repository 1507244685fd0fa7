"""Where records come from: a folder or a zip of the user, the Hub, or a dataset that was named."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from .hub import is_offline, require_network

_ARCHIVE = "data.zip"


@dataclass(frozen=True)
class Source:
    """The bytes of a file with records, and its name in messages."""

    name: str
    content: bytes

    @property
    def sha256(self) -> str:
        """Digest of the content: the same from a folder and from a zip."""
        return hashlib.sha256(self.content).hexdigest()


def local_source(data_dir: str, filenames: Sequence[str]) -> Source:
    """The first of these files in a folder, in the `data.zip` of that folder, or in a zip.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    root = Path(data_dir).expanduser()
    if root.is_file():
        return zip_source(root, filenames)
    if not root.is_dir():
        raise UserError(f"--data-dir {data_dir}: no such folder or zip file")
    for path in (folder / name for folder in (root, root / "data") for name in filenames):
        if path.exists():
            return Source(str(path), _read(path))
    if (root / _ARCHIVE).exists():
        return zip_source(root / _ARCHIVE, filenames)
    raise UserError(
        f"--data-dir {data_dir}: no {' or '.join(filenames)} in that folder, and no {_ARCHIVE}; it holds "
        f"{_some(path.name for path in root.iterdir())}"
    )


def zip_source(path: Path, filenames: Sequence[str]) -> Source:
    """The first of these files in a zip, at its root or, as in the official one, in its folder `data`."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            for name in (prefix + name for prefix in ("data/", "") for name in filenames):
                if name in members:
                    return Source(f"{path}:{name}", archive.read(name))
    except Exception as error:  # a damaged file makes the reader raise any of a dozen classes
        raise UserError(f"{path} is not a whole zip file, get it again: {error}") from error
    raise UserError(f"{path}: no {' or '.join(filenames)} in that zip file; it holds {_some(members)}")


def dataset_rows(name: str, config: str | None, split: str, revision: str | None) -> list[dict[str, Any]]:
    """All rows of a dataset that the user named, on the Hub or in a folder. No code of it is ever run.

    Args:
        name: id on the Hub or a folder.
        config: its configuration, which is the task; None where it has one only.
        split: taken if there is more than one.
        revision: of the Hub; None is the newest.
    """
    if not (Path(name).exists() or is_offline()):
        require_network(f"the dataset {name}")
    import datasets

    try:
        found = datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # whatever its reader for this kind of file raises
        what = f"{name!r}, configuration {config!r}" if config else repr(name)
        raise UserError(f"cannot load the dataset {what} (--dataset): {error}") from error
    if split not in found and len(found) > 1:
        raise UserError(f"the dataset {name!r} has no split {split!r}, it has {', '.join(found)}")
    rows = found[split] if split in found else next(iter(found.values()))
    return [dict(row) for row in rows]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _some(names: Iterator[str] | list[str]) -> str:
    """A few of these names, in order."""
    found = sorted(names)
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") if found else "nothing"
