"""Where records come from: a folder or a zip of the user, the Hub, or a dataset that was named."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError, reason
from ..hub import is_offline, require_network

_ARCHIVE = "data.zip"
#: Files that are a dataset each, and what reads them.
_READERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
#: Before the name of a dataset that is given in place of a file.
DATASETS = "datasets:"


@dataclass(frozen=True)
class Source:
    """The bytes of a file with records, and its name in messages."""

    name: str
    content: bytes


def read_source(path: Path) -> Source:
    """A file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return Source(str(path), path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


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
            return read_source(path)
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


DatasetPlace = tuple[str, str | None, str | None, str | None]
"""Name (an id on the Hub or a folder), configuration (None: it has one only), split (None: "test", or the only one) and
revision (None is the newest) of a dataset."""


def place_of_dataset(path: Path) -> DatasetPlace | None:
    """What `datasets:NAME[,CONFIGURATION[,SPLIT]]` names; None for a file.

    NAME is a folder or an id on the Hub, perhaps with @REVISION; without SPLIT it is "test", or the only one.
    """
    if not str(path).startswith(DATASETS):
        return None
    name, config, split, *rest = [*(word.strip() for word in str(path).removeprefix(DATASETS).split(",")), "", ""]
    if not name or any(rest):
        raise UserError(
            f"{path}: write {DATASETS}NAME, {DATASETS}NAME,CONFIGURATION or {DATASETS}NAME,CONFIGURATION,SPLIT"
        )
    name, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    return name, config or None, split or None, revision or None


def is_table(path: Path) -> bool:
    """Whether a file is a dataset."""
    return path.suffix in _READERS


def dataset_split(
    name: str, config: str | None, split: str | None, revision: str | None, usual: Sequence[str], stream: bool = False
) -> tuple[Iterable[Any], str]:
    """The rows of one split of a dataset that the user named, and what it is called. No code of it is ever run.

    Args:
        name: a folder, a file (Parquet, CSV, Arrow), or an id on the Hub.
        split: None is the first of the `usual` ones that it has, or the only one.
        stream: without waiting for all of them.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    place = Path(name)
    if not (place.exists() or is_offline()):
        require_network(f"the dataset {name}", "give a local folder, JSON lines, Parquet or CSV")
    import datasets

    what = f"{name!r}, configuration {config!r}" if config else repr(name)
    try:
        if place.is_file():
            splits = datasets.load_dataset(_READERS.get(place.suffix, "json"), data_files=name, streaming=stream)
        else:
            # What is in the cache of the Hub's datasets is whole already, and cannot be streamed.
            stream = stream and (place.exists() or not is_offline())
            splits = datasets.load_dataset(name, config, revision=revision, streaming=stream)
    except Exception as error:  # whatever its reader for this kind of file raises
        # The second sentence names the configurations that there are.
        raise UserError(f"cannot load the dataset {what} (--dataset): {reason(error, sentences=2)}") from error
    if split is None:
        split = next((name for name in usual if name in splits), next(iter(splits)) if len(splits) == 1 else usual[0])
    if split not in splits:
        raise UserError(f"the dataset {what} has no split {split!r}, it has {', '.join(splits)} (--dataset)")
    return splits[split], split


@lru_cache(maxsize=4)
def dataset_rows(name: str, config: str | None, split: str | None, revision: str | None) -> list[dict[str, Any]]:
    """All rows of a dataset that the user named, see `dataset_split`."""
    return [dict(row) for row in dataset_split(name, config, split, revision, ["test"])[0]]


def _some(names: Iterator[str] | list[str]) -> str:
    """A few of these names, in order."""
    shown = sorted(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") if shown else "nothing"
