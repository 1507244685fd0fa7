"""Records of files, each checked on its own, so that a mistake is shown by file and line."""

from __future__ import annotations

import gzip
import io
import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UserError
from .sources import Source

Record = dict[str, Any]
Located = tuple[str, Any]
"""Where a value stands, in words, and the value."""
_BOM = b"\xef\xbb\xbf"


class Kind(NamedTuple):
    """What a column holds, in words and as a test."""

    what: str
    accepts: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    try:  # JSON can spell half a character; no tokenizer can read it, no file can hold it
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


TEXT = Kind("a text", _is_text)
TEXTS = Kind("a list of texts, at least one", _are_texts)
TEXTS_OR_NULL = Kind("a list of texts, or null", lambda value: value is None or _are_texts(value))
#: What a record may be named by.
IDENTITY = Kind("a text or a whole number", lambda value: (_is_text(value) and value != "") or type(value) is int)
COUNT = Kind("a whole number", lambda value: type(value) is int and value >= 0)
COUNT_OR_NULL = Kind("a whole number, or null", lambda value: value is None or COUNT.accepts(value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def texts_like(example: str, pattern: str) -> Kind:
    """A column with texts that all have this pattern in them."""
    looks_right = re.compile(pattern).search
    return Kind(
        f"a list of texts like {example!r}, at least one",
        lambda value: _are_texts(value) and all(map(looks_right, value)),
    )


def one_of(*values: str) -> Kind:
    """A column with a few values."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def parse(source: Source) -> Iterator[Located]:
    """The values in a file, by its name: a list in JSON, a table in CSV or Parquet, else JSON lines; perhaps gzipped,
    where the name ends in `.gz`.

    Raises:
        UserError: it is not what its name says.
    """
    name, content = source.name, source.content
    if name.endswith(".gz"):
        name, content = name.removesuffix(".gz"), _unzipped(source)
    if name.endswith((".csv", ".parquet")):
        rows = _csv(name, content) if name.endswith(".csv") else _parquet(name, content)
        yield from ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    content = content.removeprefix(_BOM)
    if not content.strip():
        raise UserError(f"{name} is empty")
    if name.endswith(".json"):
        values = _json(content, name)
        if not isinstance(values, list):
            raise UserError(f"{name}: not a list of records")
        yield from ((f"{name}, record {number}", value) for number, value in enumerate(values, 1))
        return
    yield from json_lines(name, content.split(b"\n"))


def json_lines(name: str, lines: Iterable[bytes]) -> Iterator[Located]:
    """The values in JSON lines; blank lines are passed over.

    Args:
        lines: split as bytes, since `str.splitlines` also splits at characters that occur inside of records.

    Raises:
        UserError: a line is not JSON in UTF-8.
    """
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(_BOM) if number == 1 else line
        if line.strip():
            where = f"{name}, line {number}"
            yield where, _json(line, where)


def _unzipped(source: Source) -> bytes:
    try:
        return gzip.decompress(source.content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {source.name}: {error}") from error


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON in UTF-8 ({error})") from error


def _csv(name: str, content: bytes) -> list[Record]:
    import pandas

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of rows that are too long
            table = pandas.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, index_col=False)
    except (ValueError, pandas.errors.ParserWarning) as error:
        raise UserError(f"{name} is not CSV in UTF-8: {error} (is a comma not quoted?)") from error
    return [dict(row) for row in table.to_dict("records")]


def _parquet(name: str, content: bytes) -> list[Record]:
    import pyarrow.parquet as parquet

    try:
        rows: list[Record] = parquet.read_table(io.BytesIO(content)).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not Parquet: {error}") from error
    return rows


def checked(value: Located, task: str, required: Mapping[str, Kind], optional: Mapping[str, Kind]) -> Record:
    """A value that is a record with the right columns.

    Raises:
        UserError: names the file, the line and the column of the first mistake.
    """
    where, record = value
    if not isinstance(record, dict):
        raise UserError(f"{where}: {shown(record)} is not a record")
    missing = [repr(name) for name in required if name not in record]
    if missing:
        hint = ""
        if {"question", "answer_prefix"} <= record.keys():
            hint = (
                ". With 'question' and 'answer_prefix' this is a copy rearranged for kvpress and "
                "lm-evaluation-harness, which does not give the official prompts: take the official data.zip"
            )
        raise UserError(
            f"{where}: no column {', '.join(missing)}; the records of {task} have the columns "
            f"{', '.join(required)}{hint}"
        )
    for name, kind in {**optional, **required}.items():
        if name in record and not kind.accepts(record[name]):
            raise UserError(f"{where}: {name!r} is {shown(record[name])}, it must be {kind.what}")
    return record


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
