"""Files of predictions of kvpress's evaluation command, `predictions.csv`: pandas writes a list of answers as numpy or
Python prints it, `['Paris' 'Lutetia']`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data.records import Located, parse
from ..data.sources import read_source
from ..errors import UserError

NAME = "predictions.csv"
_LITERAL = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
_AROUND = re.compile(r"\s*(?:array\()?\[(?:np\.str_\(|[),\s])*\](?:,\s*dtype=\S+?)?\)?\s*")
_WAY_OUT = 'write them as JSON, before the file is saved: df["answers"] = df["answers"].map(list).map(json.dumps)'


def rows(path: Path) -> Iterator[Located]:
    """Place and content of each row, in the form of LongBench's `pred.py`, with the task and the compression ratio.

    Raises:
        UserError: the file is damaged, or answers in it are no list of texts that can be read again.
    """
    for where, row in parse(read_source(path)):
        answers = "answers" if "answers" in row else "answer"
        missing = [name for name in ("task", "predicted_answer", answers) if row.get(name) is None]
        if missing:
            raise UserError(f"{where} has no {missing[0]!r}, as files of kvpress have; it has {', '.join(row)}")
        classes = row.get("all_classes")
        yield (
            where,
            {
                "task": row["task"],
                "pred": row["predicted_answer"],
                "answers": texts(row[answers], f"{where}: {answers!r}"),
                "all_classes": texts(classes, f"{where}: 'all_classes'") if classes else None,
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
