"""What the README shows of one real model: a table and a picture, from the rows that are kept of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from writing import table

_KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "real_models"
#: Budgets of needles' prompts: a quarter of the tokens, and an eighth of the bytes.
QUARTER, _EIGHTH_OF_BYTES = "224", "4.92MiB"
#: What a budget of needles' prompts is of texts, which are longer.
_OF_TEXTS = {QUARTER: "25%", _EIGHTH_OF_BYTES: "5.62MiB"}
UNPREPARED = "hybrid(keydiff,expected_attention)@first_prompt"
#: Title, table of needles, table of texts, policy, budget, and candidate of `peers_speed.jsonl`.
_LINES = (
    ("after `prepare`", "prepared", "prepared_text", "auto", QUARTER, "heads"),
    ("after `prepare`, half of these bytes", "prepared", "prepared_text", "auto", _EIGHTH_OF_BYTES, None),
    ("without `prepare`", "without", "without_text", UNPREPARED, QUARTER, None),
    ("`paged_eviction`, as published", "needles", "text", "paged_eviction", QUARTER, "eager"),
    ("random eviction", "needles", "text", "random", QUARTER, None),
)
Row = dict[str, Any]


@cache
def _rows(name: str) -> tuple[Row, ...]:
    packed = (_KEPT / f"smollm2_{name}.jsonl.gz").read_bytes()
    return tuple(json.loads(line) for line in gzip.decompress(packed).decode().splitlines()[1:])


def _same(tables: Iterable[str], key: Callable[[Row], Any]) -> set[Any]:
    """What all of these tables measured."""
    return set.intersection(*({key(row) for row in _rows(name) if row["policy"] != "full"} for name in tables))


def _question(row: Row) -> tuple[str, str]:
    return row["task"], row["id"]


def _answered(asked: str) -> set[tuple[str, str]]:
    """Questions that all lines were asked, and the full cache answers."""
    names = [f"{name}_{asked}" for name in ("prepared", "without", "needles")]
    right = {_question(row) for row in _rows(names[-1]) if row["policy"] == "full" and row["score"] == 1}
    return _same(names, _question) & right


def share_right(name: str, asked: str, policy: str, budget: str) -> list[float]:
    """1.0 or 0.0 for each of the questions that all lines were asked."""
    wanted = _answered(asked)
    rows = {_question(row): row["score"] for row in _rows(f"{name}_{asked}") if _is(row, policy, budget)}
    return [rows[question] for question in sorted(wanted) if question in rows]


def _is(row: Row, policy: str, budget: str) -> bool:
    return (row["policy"], row["budget"]) == (policy, budget)


def _lost(name: str, policy: str, budget: str) -> list[float]:
    """Nats per token lost in the second half of each text that all lines read."""
    wanted = _same(("prepared_text", "without_text", "text"), lambda row: row["text"])
    full = {row["text"]: _late(row) for row in _rows(name) if row["policy"] == "full"}
    return [_late(row) - full[row["text"]] for row in _rows(name) if _is(row, policy, budget) and row["text"] in wanted]


def _late(row: Row) -> float:
    half = len(row["count"]) // 2
    return float(sum(row["loss"][half:]) / sum(row["count"][half:]))


def _cell(values: list[float], digits: int, unit: float = 1) -> str:
    if not values:
        return "not measured"
    mean, error = fmean(values), 0.0
    if len(values) > 2:
        error = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return f"{unit * mean:.{digits}f} ± {unit * error:.{digits}f}"


def _time(candidate: str | None) -> str:
    """Of a token of the same model after 8,192 others, relative to the full cache."""
    rows = map(json.loads, (_KEPT.parent / "peers_speed.jsonl").read_text("utf-8").splitlines())
    wanted = "smollm2", 8192, 1, candidate
    found = [row["ratio"] for row in rows if (row["model"], row["length"], row["rows"], row["candidate"]) == wanted]
    return f"{found[0]:.2f}" if found else "not measured"


def front(_: str) -> str:
    """The table of the README."""
    lines = [["full cache", "100 %", "0", "100", "100", "1"]]
    for title, needles, texts, policy, budget, candidate in _LINES:
        size = "12.5 %" if budget == _EIGHTH_OF_BYTES else "25 %"
        lost = _cell(_lost(texts, policy, _OF_TEXTS[budget]), 3)
        right = [_cell(share_right(needles, asked, policy, budget), 0, 100) for asked in ("unknown", "known")]
        lines.append([title, size, lost, *right, _time(candidate)])
    counts = [len(_answered(asked)) for asked in ("unknown", "known")]
    texts = len(_same(("prepared_text", "without_text", "text"), lambda row: row["text"]))
    header = ("cache", "memory", "running text: nats lost", "unknown: right, %", "known: right, %", "time of a token")
    asked = f"{counts[0]} and {counts[1]} prompts of about 1,000 that the full cache answers"
    said = f"{texts} texts of 1,024 tokens; {asked}. Time: a token after 8,192 others, at a budget of 1,024."
    return f"{table(header, lines)}\n\n{said}"
