"""Records of JSON files, each checked on its own, so that a mistake is shown by file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import UserError
from .sources import Source

Record = dict[str, Any]
_GZIP = b"\x1f\x8b"
Located = tuple[str, Any]
"""Where a value stands, in words, and the value."""


class Kind(NamedTuple):
    """What a column holds, in words and as a test."""

    what: str
    accepts: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    # JSON can spell half a character; no tokenizer can read it, no file can hold it.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


TEXT = Kind("a text", _is_text)
TEXTS = Kind("a list of texts, at least one", _are_texts)
TEXTS_OR_NULL = Kind("a list of texts, or null", lambda value: value is None or _are_texts(value))
#: What a record may be named by.
IDENTITY = Kind("a text or a whole number", lambda value: (_is_text(value) and value != "") or type(value) is int)
COUNT = Kind("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def texts_like(example: str, pattern: str) -> Kind:
    """A column with texts that all have this pattern in them."""
    found = re.compile(pattern)
    return Kind(
        f"a list of texts like {example!r}, at least one",
        lambda value: _are_texts(value) and all(map(found.search, value)),
    )


def one_of(*values: str) -> Kind:
    """A column with a few values."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def parse(source: Source) -> Iterator[Located]:
    """The values in a file of JSON lines or, where its name ends in `.json`, of one list."""
    refuse_gzip(source.name, source.content)
    if not source.content.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"{source.name} is empty")
    content = source.content.removeprefix(b"\xef\xbb\xbf")
    if source.name.endswith(".json"):
        values = _json(content, source.name)
        if not isinstance(values, list):
            raise UserError(f"{source.name}: not a list of records")
        yield from ((f"{source.name}, record {number}", value) for number, value in enumerate(values, 1))
        return
    # Split as bytes: in a text more characters end a line, and those stand inside of records.
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            where = f"{source.name}, line {number}"
            yield where, _json(line, where)


def refuse_gzip(name: str, content: bytes) -> None:
    """Refuse a file by its beginning.

    Raises:
        UserError: it is gzipped.
    """
    if content.startswith(_GZIP):
        raise UserError(f"{name} is gzipped; unpack it first (gunzip)")


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{where}: not a record (nested too deep)") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error


def check(
    values: Iterable[Located], required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None
) -> list[Record]:
    """The records among `values`, all of which must be records with the right columns and an `_id` of their own.

    Raises:
        UserError: names the file, the line and the column of the first mistake.
    """
    records: list[Record] = []
    first: dict[str, str] = {}
    for where, value in values:
        if not isinstance(value, dict):
            raise UserError(f"{where}: {shown(value)} is not a record")
        _check_columns(where, value, required)
        for name, kind in {**required, **(optional or {})}.items():
            if name in value and not kind.accepts(value[name]):
                raise UserError(f"{where}: {name!r} is {shown(value[name])}, it must be {kind.what}")
        identity = value["_id"]
        if identity in first:
            raise UserError(f"{where}: the same '_id' {identity!r} as in {first[identity]}; remove one of the two")
        first[identity] = where
        records.append(value)
    return records


def _check_columns(where: str, record: Record, required: Mapping[str, Kind]) -> None:
    missing = [repr(name) for name in required if name not in record]
    if not missing:
        return
    message = f"{where}: no column {', '.join(missing)}; a record has the columns {', '.join(required)}"
    if {"question", "answer_prefix"} <= record.keys():
        message += (
            ". With 'question' and 'answer_prefix' this is a copy rearranged for kvpress and lm-evaluation-harness, "
            "which does not give the official prompts: take the official data.zip"
        )
    raise UserError(message)


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
