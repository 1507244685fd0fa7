"""Records of files, each checked on its own, so that a mistake is shown by file and line."""

from __future__ import annotations

import gzip
import io
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..errors import UserError

Record = dict[str, Any]
Located = tuple[str, Any]
"""Where a value stands, in words, and the value."""
_BOM = b"\xef\xbb\xbf"
_REARRANGED = (
    ". With 'question' and 'answer_prefix' this is a copy rearranged for kvpress and lm-evaluation-harness, which does "
    "not give the official prompts: take the official data.zip"
)


def _whole(text: str) -> str:
    text.encode()  # JSON can spell half a character; no tokenizer can read it, no file can hold it
    return text


#: What columns hold, see `checked`.
TEXT = Annotated[str, AfterValidator(_whole)]
TEXTS = Annotated[list[TEXT], Field(min_length=1)]
COUNT = NonNegativeInt
#: What a record may be named by.
IDENTITY = Annotated[TEXT, Field(min_length=1)] | int
_validator = lru_cache(TypeAdapter)
#: A `TypedDict` whose names are known at run time alone.
columns_of: Callable[[str, dict[str, Any]], Any] = TypedDict  # type: ignore[assignment]


def parse(name: str, content: bytes) -> Iterator[Located]:
    """The values in a file, by its name: a list in JSON, a table in CSV or Parquet, else JSON lines; perhaps gzipped,
    where the name ends in `.gz`.

    Raises:
        UserError: it is not what its name says.
    """
    try:
        if name.endswith(".gz"):
            name, content = name.removesuffix(".gz"), gzip.decompress(content)
        reader = _READERS.get(PurePath(name).suffix)
        values = reader(content) if reader else None
    except Exception as error:  # each reader raises classes of its own
        raise UserError(f"cannot read {name}: {error}") from error
    if reader and not isinstance(values, list):
        raise UserError(f"{name}: not a list of records")
    if values is None:
        yield from json_lines(name, content.split(b"\n"))
    else:
        yield from ((f"{name}, record {number}", value) for number, value in enumerate(values, 1))


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
            try:
                yield where, json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON in UTF-8 ({error})") from error


def _csv(content: bytes) -> Any:
    """All cells as texts: `datasets` would make numbers of them, so that 007 is answered by 7."""
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of rows that are too long, where a comma is not quoted
        table = pandas.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, index_col=False)
    return table.to_dict("records")


def _parquet(content: bytes) -> Any:
    from pyarrow import parquet

    return parquet.read_table(io.BytesIO(content)).to_pylist()


#: What is not here is JSON lines. They are not read by `datasets` either: it makes moments of texts like 2024-05-01.
_READERS: dict[str, Callable[[bytes], Any]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".json": lambda content: json.loads(content.decode("utf-8-sig")),
}


def checked(value: Located, task: str, columns: Any) -> Record:
    """A value that is a record with the right columns.

    Args:
        columns: a `TypedDict`; columns that it does not name may hold anything.

    Raises:
        UserError: names the file, the line and the column of the first mistake.
    """
    where, record = value
    try:
        _validator(columns).validate_python(record, strict=True)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        if not isinstance(record, dict):
            raise UserError(f"{where}: {shown(record)} is not a record") from error
        if missing := ", ".join(repr(one["loc"][0]) for one in mistakes if one["type"] == "missing"):
            hint = _REARRANGED if {"question", "answer_prefix"} <= record.keys() else ""
            wanted = ", ".join(sorted(columns.__required_keys__))
            raise UserError(f"{where}: no column {missing}; the records of {task} have {wanted}{hint}") from error
        name = mistakes[0]["loc"][0]
        reasons = dict.fromkeys(one["msg"] for one in mistakes if one["loc"][0] == name)
        raise UserError(f"{where}: {name!r} is {shown(record[str(name)])}: {', or '.join(reasons)}") from error
    result: Record = record
    return result


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
