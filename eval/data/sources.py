"""Where records come from: a folder or a zip of the user, the Hub, or a dataset that was named."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, reason
from ..hub import is_offline, require_network

_ARCHIVE = "data.zip"
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


class DatasetPlace(NamedTuple):
    """Name (an id on the Hub, or a folder), configuration (None: it has one only), split (None: a usual one, or the
    only one) and revision (None is the newest) of a dataset."""

    name: str
    config: str | None
    split: str | None
    revision: str | None


def place_of_dataset(spec: str, revision: str | None = None) -> DatasetPlace:
    """What `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT` (`ID::SPLIT` where there is one configuration only) names.

    Args:
        spec: the id is a name on the Hub, perhaps with @REVISION, or a folder.
        revision: of an option of its own.

    Raises:
        UserError: it is written otherwise, or there are two revisions.
    """
    name, *rest = (word.strip() for word in spec.split(":"))
    here = bool(name) and Path(name).exists()
    if not name or len(rest) > 2 or ("," in name and not here):
        raise UserError(f"dataset {spec!r}: write ID, ID:CONFIG or ID:CONFIG:SPLIT")
    name, _, own = (name, "", "") if here else name.partition("@")
    if own and revision and own != revision:
        raise UserError(f"dataset {spec!r}: it names the revision {own}, and --dataset-revision {revision}: give one")
    config, split = [*(word or None for word in rest), None, None][:2]
    return DatasetPlace(name, config, split, own or revision)


def own_dataset(path: Path) -> DatasetPlace | None:
    """The dataset that is given in place of a file, `datasets:ID`; None for a file."""
    text = str(path)
    return place_of_dataset(text.removeprefix(DATASETS)) if text.startswith(DATASETS) else None


def dataset_split(place: DatasetPlace, usual: Sequence[str], stream: bool = False) -> tuple[Iterable[Any], str]:
    """The rows of one split of a dataset that the user named, and what it is called. No code of it is ever run.

    Args:
        place: of the dataset.
        usual: if no split is named: the first of these that the dataset has, or its only one.
        stream: do not wait for all rows.

    Raises:
        UserError: it cannot be loaded, or has no such split.
    """
    name, config, split, revision = place
    path = Path(name)
    if path.is_file():
        raise UserError(f"{name} is a file, and a dataset is a folder or a name on the Hub: give the file itself")
    if not (path.exists() or is_offline()):
        require_network(f"the dataset {name}", "give a local folder, JSON lines, Parquet or CSV")
    import datasets

    what = f"{name!r}, configuration {config!r}" if config else repr(name)
    try:
        # What is in the cache of the Hub's datasets is whole already, and cannot be streamed.
        stream = stream and (path.exists() or not is_offline())
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
def dataset_rows(place: DatasetPlace) -> list[dict[str, Any]]:
    """All rows of a dataset that the user named, see `dataset_split`."""
    return [dict(row) for row in dataset_split(place, ["test"])[0]]


def _some(names: Iterator[str] | list[str]) -> str:
    """A few of these names, in order."""
    shown = sorted(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") if shown else "nothing"
