"""Tables of `long_rows.py`: what caches answer of long documents, with documents as the sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import sqrt
from statistics import fmean
from typing import Any

from common import cell, table
from long_documents import KINDS

Row = dict[str, Any]
Cell = tuple[str, int, int]
#: Name and share of a cache.
Cache = tuple[str, str]
#: A model that answers fewer of a kind with the full cache is not asked: the rest would be luck.
ABLE = 0.6
FULL: Cache = ("full", "")
#: Fewer documents than these make no line.
FEWEST = 4
TITLES = {
    "full": "full cache",
    "prepared": "after `prepare`",
    "oracle": "after `prepare`, facts protected",
    "unprepared": "without `prepare`",
    "bits8": "all tokens in 8 bits",
    "bits4": "all tokens in 4 bits",
    "bits3": "all tokens in 3 bits",
    "bits2": "all tokens in 2 bits",
    "int4": "`QuantizedCache`, quanto int4",
    "int2": "`QuantizedCache`, quanto int2",
    "kvzip": "kvpress, KVzip",
    "adakv": "kvpress, AdaKV of ExpectedAttention",
}


def cells(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """Rows of questions, text and reading by model, length and chunk; a row that was measured twice counts once."""
    once: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] not in ("run", "answer"):
            once[(*cell_of(row), row["document"], row["cache"], row["share"], row["kind"], row.get("question"))] = row
    found: dict[Cell, list[Row]] = {}
    for row in once.values():
        found.setdefault(cell_of(row), []).append(row)
    return found


def cell_of(row: Row) -> Cell:
    """Model, length, and chunk; 0 = one forward."""
    return row["model"], row["length"], row["chunk"]


def able(rows: Iterable[Row]) -> list[str]:
    """Kinds of questions that the full cache answers, most of them."""
    right: dict[str, list[bool]] = {}
    for row in rows:
        if row["cache"] == "full" and "right" in row:
            right.setdefault(row["kind"], []).append(row["right"])
    return [kind for kind in KINDS if kind in right and fmean(right[kind]) >= ABLE]


def title(name: str) -> str:
    """What tables call a cache."""
    return TITLES.get(name, f"`{name}`")


def cache_of(row: Row) -> Cache:
    """Which cache was measured."""
    return row["cache"], row["share"]


def of_cache(rows: Iterable[Row], one: Cache) -> list[Row]:
    """The rows of a cache."""
    return [row for row in rows if cache_of(row) == one]


def in_order(caches: Iterable[Cache]) -> list[Cache]:
    """Caches in the order of tables, each once."""
    places = {name: at for at, name in enumerate(TITLES)}
    other = places["unprepared"] + 0.5
    return sorted({*caches}, key=lambda one: (places.get(one[0], other), one[0], -Fraction(one[1] or 1)))


def share(rows: Iterable[Row]) -> str:
    """Right of asked, and the standard error of their share in percent: questions of a document are no sample.

    The error is not below that of as many independent questions, of which one more is right and one more wrong: where
    all documents agree it would be 0.
    """
    by_document: dict[int, list[bool]] = {}
    for row in rows:
        by_document.setdefault(row["document"], []).append(row["right"])
    right, asked = (sum(map(count, by_document.values())) for count in (sum, len))
    if not asked:
        return ""
    mean, number = right / asked, len(by_document)
    apart = sum((sum(own) - mean * len(own)) ** 2 for own in by_document.values())
    clustered = sqrt(number / (number - 1) * apart) / asked if number > 1 else 1.0
    likely = (right + 1) / (asked + 2)
    return f"{right}/{asked} ± {100 * max(clustered, sqrt(likely * (1 - likely) / asked)):.0f} %"


def lines(rows: list[Row]) -> dict[Cache, dict[str, str]]:
    """Of each cache that has read enough documents the cells of its line, by their columns."""
    kinds = able(rows)
    full = {row["document"]: row["nats"] for row in of_cache(rows, FULL) if row["kind"] == "text"}
    found = {}
    for one in in_order(map(cache_of, rows)):
        own = of_cache(rows, one)
        lost = [row["nats"] - full[row["document"]] for row in own if row["kind"] == "text"]
        if len(lost) >= FEWEST:
            reading = [row for row in own if row["kind"] == "read"]
            found[one] = {
                "cache": title(one[0]),
                "memory": one[1] or memory(rows, reading),
                "documents": f"{len(reading)}",
                **{KINDS[kind]: share(row for row in own if row["kind"] == kind) for kind in kinds},
                "all kinds": share(row for row in own if row["kind"] in kinds),
                "text: nats lost": "0" if one == FULL else cell(lost, 3, "+"),
                "reading, s": f"{fmean(row['seconds'] for row in reading):.1f}",
                "peak, MiB": f"{fmean(row['peak'] for row in reading) / 2**20:.1f}",
            }
    return found


def memory(rows: list[Row], reading: list[Row]) -> str:
    """Bytes at the end, in shares of those of the full cache of a cell, whose keys and values have 16 bits."""
    full = {row["document"]: row["bytes"] for row in of_cache(rows, FULL) if row["kind"] == "read"}
    return f"{fmean(row['bytes'] / full[row['document']] for row in reading):.2g}"


def answers(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """How far the predictions of long answers are from the full cache's, a line for each cache.

    Args:
        titles: what to call models.
    """
    rows = list(rows)
    read = cells(rows)
    found: dict[tuple[Cell, Cache], dict[int, dict[int, Row]]] = {}
    for row in rows:
        if row["kind"] == "answer":
            parts = found.setdefault((cell_of(row), cache_of(row)), {})
            parts.setdefault(row["question"], {})[row["document"]] = row
    body, places = [], in_order(one for _, one in found)
    for (one_cell, one), parts in sorted(found.items(), key=lambda item: (item[0][0], places.index(item[0][1]))):
        if (number := len(parts[0])) >= FEWEST:
            model, length, _ = one_cell
            memory_of = one[1] or lines(read.get(one_cell, [])).get(one, {}).get("memory", "")
            own = [titles.get(model, model), f"{length:,}", title(one[0]), memory_of, f"{number}"]
            body.append([*own, *(_apart(parts[at].values()) for at in sorted(parts))])
    starts = sorted({start for parts in found.values() for start in parts})
    header = ("model", "behind", "cache", "memory", "answers", *(f"from {at + 1}" for at in starts))
    return table(header, body) if body else ""


def _apart(rows: Iterable[Row]) -> str:
    """Divergence in nats with its standard error, and the share of equal first choices."""
    far, same = zip(*((row["kl"], row["same"]) for row in rows), strict=True)
    return f"{cell(far, 4)}; {100 * fmean(same):.1f} %"


def tables(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """All cells that have lines, each under its title.

    Args:
        titles: what to call models.
    """
    found = []
    for (model, length, chunk), own in sorted(cells(rows).items()):
        if made := lines(own):
            how = f"in chunks of {chunk}" if chunk else "in one forward"
            found.append(f"{titles.get(model, model)}, {length:,} tokens {how}:\n\n{shown(made.values())}")
    return "\n\n".join(found)


def shown(found: Iterable[Mapping[str, str]]) -> str:
    """A table of lines, with those columns of the first one that are not empty; others may lack some."""
    body = list(found)
    header = tuple(name for name in body[0] if any(line.get(name) for line in body))
    return table(header, [[line.get(name, "") for name in header] for line in body])
