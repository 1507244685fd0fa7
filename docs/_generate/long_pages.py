"""Long texts that are read in chunks and asked: the rows of `benchmarks/long_rows.py` and `long_kvpress.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import memory_tables
from long_documents import KINDS
from long_reader import FILE, read_rows
from long_summary import by_kind, by_length, ways
from long_tables import FEWEST, able, answers, cells, lines, shown

#: Models, as their rows call them, and as the pages do; the README shows the first one that has a cell.
_MODELS = {
    "qwen": memory_tables.MODELS["qwen-coder-0.5b"],
    "smollm2": memory_tables.MODELS["smollm2"],
    "qwen-1.5b": memory_tables.MODELS["qwen-coder-1.5b"],
}
#: Tokens that are read at once in the README's table, and its kinds of questions.
_CHUNK, _ASKED = 512, ("one", "hop")
#: Caches of `long_kvpress.py`.
_PRESSES = ("kvzip", "adakv")
Row = dict[str, Any]


@cache
def _rows() -> tuple[Row, ...]:
    return tuple(read_rows(FILE))


def long_rows(_: str) -> str:
    """What is answered in chunks, by length and by kind."""
    kinds = "By kind of question, over all lengths; seconds and bytes of the longest:"
    return f"{by_length(_rows(), _MODELS)}\n\n{kinds}\n\n{by_kind(_rows(), _MODELS)}"


def long_ways(_: str) -> str:
    """What chunks lose against one forward, and what presses of kvpress answer, which read in one."""
    beside = [
        {"model": _MODELS[model], "tokens": f"{length:,}", **line}
        for (model, length, _), rows in sorted(cells(_rows()).items())
        if any(row["cache"] in _PRESSES for row in rows)
        for line in lines(rows).values()
    ]
    return f"{ways(_rows(), _MODELS)}\n\nIn one forward:\n\n{shown(beside)}"


def long_answers(_: str) -> str:
    """How far caches are from the full cache while long answers are read."""
    return (
        "How far predictions are from the full cache's, in nats, and how many first choices are the same, while the "
        f"full cache's own answer is read one token at a time; 250 tokens each:\n\n{answers(_rows(), _MODELS)}"
    )


def front(_: str) -> str:
    """The table of the README: the longest texts of one model of which there are enough documents."""
    model, length, rows = _longest()
    kinds, made = able(rows), lines(rows).values()
    asked = [KINDS[kind] for kind in _ASKED if kind in kinds]
    body = [{name: line[name] for name in ("cache", "memory", *asked, "all kinds", "text: nats lost")} for line in made]
    documents = sorted({int(line["documents"]) for line in made})
    counted = " to ".join(str(number) for number in dict.fromkeys((documents[0], documents[-1])))
    return (
        f"**Longer, read in chunks** of {_CHUNK}: {_MODELS[model]}, {counted} documents of {length:,} tokens, right of "
        "the questions that the full cache answers (its own line: of all; [all kinds, lengths and models]"
        f"(docs/real_models.md#long-texts-read-in-chunks)).\n\n{shown(body)}"
    )


def _longest() -> tuple[str, int, list[Row]]:
    """Model, length and rows of the README: the longest texts that the full and a prepared cache have read."""
    for model in _MODELS:
        for (name, length, chunk), rows in sorted(cells(_rows()).items(), reverse=True):
            if (name, chunk) == (model, _CHUNK) and {"full", "prepared"} <= {one for one, _ in lines(rows)}:
                return model, length, rows
    raise ValueError(f"{FILE} has no {FEWEST} documents that the full and a prepared cache have read in chunks")
