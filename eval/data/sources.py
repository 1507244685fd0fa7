"""Where records come from: a folder or a zip of the user, the Hub, or a dataset that was named."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, reason
from ..hub import is_offline, require_network

#: Before the name of a dataset that is given in place of a file.
DATASETS = "datasets:"
#: A file, in a folder or in a zip.
Source = Path | zipfile.Path


def read_source(source: Source) -> bytes:
    """The content of a file.

    Raises:
        UserError: it cannot be read.
    """
    with _reading(source):
        return source.read_bytes()


def local_source(data_dir: str, filenames: Sequence[str]) -> Source:
    """The first of these files in a folder, or in the `data.zip` of that folder, or in a zip; there, or in `data/`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    root = Path(data_dir).expanduser()
    if not root.exists():
        raise UserError(f"--data-dir {data_dir}: no such folder or zip file")
    archive = root / "data.zip" if root.is_dir() else root
    folders: list[Source] = [root, root / "data"] if root.is_dir() else []
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    with _reading(archive):
        for place in (folder / name for folder in folders for name in filenames):
            if place.exists():
                return place
        if archive.exists():
            inside = zipfile.Path(archive)
            for member in (inside / f"{folder}{name}" for folder in ("", "data/") for name in filenames):
                if member.exists():
                    return member
            names += [name for name in inside.root.namelist() if not name.endswith("/")]
    held = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"
    where = archive if archive.exists() else root
    raise UserError(f"{where}: no {' or '.join(filenames)} there; it holds {held}")


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged zip makes its reader raise any of a dozen classes
        raise UserError(f"cannot read {source} ({error}); if it is damaged, get it again") from error


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
        spec: perhaps after `datasets:`; the id is a name on the Hub, perhaps with @REVISION, or a folder.
        revision: of an option of its own.

    Raises:
        UserError: it is written otherwise, or there are two revisions.
    """
    path, *rest = (word.strip() for word in spec.removeprefix(DATASETS).split(":"))
    here = bool(path) and Path(path).exists()
    name, _, own = (path, "", "") if here else path.partition("@")
    if not name or len(rest) > 2 or ("," in name and not here):
        raise UserError(f"dataset {spec!r}: write ID, ID:CONFIG or ID:CONFIG:SPLIT")
    if own and revision and own != revision:
        raise UserError(f"dataset {spec!r}: it names the revision {own}, and --dataset-revision {revision}: give one")
    config, split = [*(word or None for word in rest), None, None][:2]
    return DatasetPlace(name, config, split, own or revision)


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
    split = split or next((name for name in (list(splits) if len(splits) == 1 else usual) if name in splits), usual[0])
    if split not in splits:
        raise UserError(f"the dataset {what} has no split {split!r}, it has {', '.join(splits)} (--dataset)")
    return splits[split], split


@lru_cache(maxsize=4)
def dataset_rows(spec: str) -> list[dict[str, Any]]:
    """All rows of a dataset that the user named, see `place_of_dataset`."""
    return [dict(row) for row in dataset_split(place_of_dataset(spec), ["test"])[0]]
