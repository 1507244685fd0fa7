"""A quarter of the tokens on one real model: a table and the picture of the README, from rows that are kept."""

from __future__ import annotations

from functools import cache
from typing import Any

from measured import where
from pandas import DataFrame, Series
from peers_speed import Case, key_of, load_rows
from real_rows import QUARTER, UNPREPARED, answered, cell, less, load, percent
from writing import table

#: What a budget of needles' prompts is of texts, which are longer.
_OF_TEXTS = {QUARTER: "25%"}
#: Tables of needles, and of texts.
_TEXTS = {"prepared": "prepared_text", "without": "without_text", "needles": "text"}
#: Title, table of needles, policy, budget, and candidate of `peers_speed.jsonl`.
_LINES = (
    ("after `prepare`", "prepared", "auto", QUARTER, "prepared"),
    ("without `prepare`", "without", UNPREPARED, QUARTER, "unprepared"),
    ("`paged_eviction`, as published", "needles", "paged_eviction", QUARTER, "published"),
    ("random eviction", "needles", "random", QUARTER, "random"),
)


@cache
def _needles(protocol: str) -> dict[str, DataFrame]:
    """By table, rows of the prompts that all tables have and the full cache answers."""
    return _of_same({name: answered(load("smollm2", f"{name}_{protocol}")) for name in _TEXTS})


@cache
def _texts() -> dict[str, DataFrame]:
    """By table of needles, rows of the texts that all tables have, with the nats that each cache loses."""
    frames = _of_same({name: load("smollm2", texts) for name, texts in _TEXTS.items()})
    return {name: frame.assign(lost=-less(frame, "loss")) for name, frame in frames.items()}


def _of_same(frames: dict[str, DataFrame]) -> dict[str, DataFrame]:
    same = set.intersection(*(set(frame["prompt"]) for frame in frames.values()))
    return {name: frame[frame["prompt"].isin(same)] for name, frame in frames.items()}


def _of(frame: DataFrame, policy: str, budget: str) -> DataFrame:
    return frame[(frame["policy"] == policy) & (frame["budget"] == budget)]


def right(name: str, protocol: str, policy: str, budget: str) -> Series:
    """1.0 or 0.0 for each of the prompts that all tables have."""
    return _of(_needles(protocol)[name], policy, budget)["score"]


@cache
def _speeds() -> dict[str, dict[str, Any]]:
    """By candidate, the row of a token of the same model after 8,192 others."""
    rows = {key_of(row): row for row in load_rows()}
    return {key.candidate: row for key, row in rows.items() if key == Case("token", "smollm2", 8192, 1, key.candidate)}


def front(_: str) -> str:
    """A quarter of the tokens, the time of a token beside it."""
    lines = [["full cache", "100 %", "0", "100", "100", "1"]]
    for title, name, policy, budget, candidate in _LINES:
        lost = cell(_of(_texts()[name], policy, _OF_TEXTS[budget])["lost"], 3)
        shares = [percent(right(name, protocol, policy, budget)) for protocol in ("unknown", "known")]
        lines.append([title, "25 %", lost, *shares, f"{_speeds()[candidate]['ratio']:.2f}"])
    unknown, known = (_needles(protocol)["needles"]["prompt"].nunique() for protocol in ("unknown", "known"))
    header = ("cache", "memory", "running text: nats lost", "unknown: right, %", "known: right, %", "time of a token")
    texts = _texts()["needles"]["prompt"].nunique()
    prompts = f"the {unknown}" if unknown == known else f"{unknown} (unknown) and {known} (known)"
    note = (
        "Memory: of keys and values in 16 bits; the model ran in float32. "
        f"Right answers: of {prompts} prompts of about 1,000 tokens that the full cache answers. Nats: {texts} texts "
        "of 1,024 tokens. "
        "Time: a token after 8,192 others, at a budget of 1,024 (`python benchmarks/peers.py speed`; "
        f"{where(_speeds()['prepared']['environment'])})."
    )
    return f"{table(header, lines)}\n\n{note}"
