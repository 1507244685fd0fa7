"""Real texts to predict: files, a dataset, or modules of the standard library that the embedded model never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..options.files import read_text
from .records import json_lines
from .sources import dataset_split, place_of_dataset

#: Fields of a JSON-lines record or columns of a dataset that hold its text, the first one found counts.
FIELDS = ("context", "text")
#: Where the texts are when a dataset has several splits and none was named.
SPLITS = ("test", "validation", "train")
_EITHER = " or ".join(map(repr, FIELDS))


@dataclass(frozen=True)
class Text:
    """One document."""

    name: str
    content: str


def read_texts(files: Sequence[str]) -> list[Text]:
    """The documents of these files in turns, so that the first few come from all of them.

    Without files, the held-out modules of the standard library.

    Raises:
        UserError: a file cannot be read, or a record of it holds no text; names file and line.
    """
    if not files:
        from .library import held_out_texts

        return [Text(name, content) for name, content in held_out_texts().items()]
    turns = zip_longest(*(_read_file(Path(name)) for name in files))
    return [text for turn in turns for text in turn if text is not None]


def _read_file(path: Path) -> Iterator[Text]:
    if path.suffix != ".jsonl":
        yield Text(str(path), read_text("--text", path))
        return
    try:
        with path.open("rb") as file:
            for where, record in json_lines(str(path), file):
                yield Text(f"{path}:{where.rpartition(' ')[2]}", _text_of(record, where, "field"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _text_of(record: Any, name: str, part: str) -> str:
    """The text of a record of which messages speak as `name`, and of its `part`s."""
    if not isinstance(record, dict):
        raise UserError(f"{name}: {type(record).__name__} instead of an object with a {part} {_EITHER}")
    texts = [record[field] for field in FIELDS if isinstance(record.get(field), str)]
    if not texts:
        has = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in list(record.items())[:8]) or "nothing"
        raise UserError(f"{name}: no {part} {_EITHER} with a text; it has {has}")
    if any("\ud800" <= char <= "\udfff" for char in texts[0]):
        raise UserError(f"{name}: half of a surrogate pair is no text, write the whole character")
    return str(texts[0])


def read_dataset(spec: str, revision: str | None = None) -> Iterator[Text]:
    """The documents of a dataset, row by row, without waiting for the rest of it. No code of it is ever run.

    Args:
        spec: see `place_of_dataset`.
        revision: of the Hub; None is the newest.

    Raises:
        UserError: the dataset, the configuration or the split does not exist, there is no network, or a row has no
            column `context` or `text` with a text.
    """
    place = place_of_dataset(spec, revision)
    rows, split = dataset_split(place, SPLITS, stream=True)
    number = 0
    try:
        for row in rows:
            number += 1
            yield Text(f"{place.name}:{split}:{number}", _text_of(row, f"--dataset {spec}, row {number}", "column"))
    except UserError:
        raise
    except Exception as error:  # whatever its reader for this kind of file raises
        raise UserError(f"--dataset {spec}: cannot read what comes after row {number}: {error}") from error
