"""Real texts to predict: files, a dataset, or modules of the standard library that the embedded model never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from ..errors import UserError
from ..options.files import read_text
from .records import TEXT, checked, parse, shown
from .sources import dataset_split, place_of_dataset, read_source

#: Fields of a JSON-lines record or columns of a dataset that hold its text, the first one found counts.
FIELDS = ("context", "text")
#: Where the texts are when a dataset has several splits and none was named.
SPLITS = ("test", "validation", "train")


class _Record(TypedDict):
    text: TEXT


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
    for where, record in parse(str(path), read_source(path)):
        yield Text(f"{path}:{where.rpartition(' ')[2]}", _text_of(where, record))


def _text_of(where: str, record: Any) -> str:
    fields = checked((where, record), "texts", dict[str, Any])
    texts = [fields[name] for name in FIELDS if isinstance(fields.get(name), str)]
    if not texts:
        raise UserError(f"{where}: no text in 'context' or 'text': {shown(fields)}")
    return str(checked((where, {"text": texts[0]}), "texts", _Record)["text"])


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
        for number, row in enumerate(rows, 1):
            yield Text(f"{place.name}:{split}:{number}", _text_of(f"--dataset {spec}, row {number}", row))
    except UserError:
        raise
    except Exception as error:  # whatever its reader for this kind of file raises
        raise UserError(f"--dataset {spec}: cannot read what comes after row {number}: {error}") from error
