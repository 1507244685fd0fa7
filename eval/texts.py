"""Real texts to predict: files of the user, or modules of the standard library that the embedded model never saw."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .errors import UserError

#: Fields of a JSON-lines record that hold its text, the first one found counts.
FIELDS = ("context", "text")


@dataclass(frozen=True)
class Text:
    """One document."""

    name: str
    content: str


def read_texts(files: Sequence[str]) -> list[Text]:
    """The documents of these files in turns, so that the first few come from all of them.

    Without files, the held-out modules of the standard library.
    """
    if not files:
        from .tasks import held_out_texts

        return [Text(name, content) for name, content in held_out_texts().items()]
    turns = zip_longest(*(_read_file(Path(name)) for name in files))
    return [text for turn in turns for text in turn if text is not None]


def _read_file(path: Path) -> Iterator[Text]:
    try:
        content = path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text in UTF-8") from error
    if path.suffix == ".jsonl":
        yield from _read_records(path, content)
    else:
        yield Text(str(path), content)


def _read_records(path: Path, content: str) -> Iterator[Text]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from error
        fields = [name for name in FIELDS if isinstance(record, dict) and isinstance(record.get(name), str)]
        if not fields:
            raise UserError(f"{path}, line {number}: no field {' or '.join(map(repr, FIELDS))} with a text")
        yield Text(f"{path}:{number}", record[fields[0]])
