"""Files of predictions of kvpress's evaluation command, `predictions.csv`: pandas writes a list of answers as numpy or
Python prints it, `['Paris' 'Lutetia']`."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

NAME = "predictions.csv"
_LITERAL = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
_AROUND = re.compile(r"\s*(?:array\()?\[(?:np\.str_\(|[),\s])*\](?:,\s*dtype=\S+?)?\)?\s*")
_WAY_OUT = 'write them as JSON, before the file is saved: df["answers"] = df["answers"].map(list).map(json.dumps)'


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each row, in the form of LongBench's `pred.py`, with the task and the compression ratio.

    Raises:
        UserError: the file is damaged, or answers in it are no list of texts that can be read again.
    """
    csv.field_size_limit(2**31 - 1)
    try:
        table = list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""), strict=True))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not CSV in UTF-8: {error}") from error
    for number, row in enumerate(table, 1):
        answers = "answers" if "answers" in row else "answer"
        missing = [name for name in ("task", "predicted_answer", answers) if row.get(name) is None]
        if missing:
            raise UserError(
                f"{path}, row {number} has no {missing[0]!r}, as files of kvpress have; it has {', '.join(row)}"
            )
        where = f"{path}, row {number}"
        yield (
            number,
            {
                "task": row["task"],
                "pred": row["predicted_answer"],
                "answers": texts(row[answers], f"{where}: {answers!r}"),
                "all_classes": texts(row["all_classes"], f"{where}: 'all_classes'") if row.get("all_classes") else None,
                "length": _count(row.get("length")),
                "compression_ratio": row.get("compression_ratio"),
            },
        )


def texts(cell: str, where: str) -> list[str]:
    """The texts of a list or an array, as JSON, Python or numpy writes it.

    Raises:
        UserError: it is none, or parts of it were left out.
    """
    try:
        values = json.loads(cell)
    except ValueError:
        values = None
        if _AROUND.fullmatch(_LITERAL.sub("", cell)):
            # One by one: between the elements of an array there is no comma, and Python would join them.
            values = [_literal(text, where) for text in _LITERAL.findall(cell)]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise UserError(f"{where} is {cell[:60]!r}, which is no list of texts; {_WAY_OUT}")
    return values


def _literal(text: str, where: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise UserError(f"{where} has {text[:60]!r}, which is no text ({error}); {_WAY_OUT}") from error


def _count(cell: str | None) -> int | None:
    """Words of a record; pandas makes decimals of numbers where one is missing."""
    match = re.fullmatch(r"(\d+)(?:\.0)?", cell or "")
    return int(match[1]) if match else None
