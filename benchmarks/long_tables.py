"""Tables of `long_rows.py`: what caches answer of long documents, with documents as the sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from common import cell, table
from long_documents import KINDS

Row = dict[str, Any]
Cell = tuple[str, int, int]
#: A model that answers fewer of a kind with the full cache is not asked: the rest would be luck.
ABLE = 0.6
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


def lines(rows: list[Row], kinds: list[str]) -> Iterator[list[str]]:
    """A line of cells for each cache."""
    caches = list(dict.fromkeys((row["cache"], row["share"]) for row in rows))
    order = [*TITLES]
    places = {name: order.index(name) if name in order else order.index("unprepared") + 0.5 for name, _ in caches}
    caches.sort(key=lambda one: (places[one[0]], one[0], -Fraction(one[1] or 1)))
    full = {row["document"]: row["nats"] for row in rows if row["cache"] == "full" and row["kind"] == "text"}
    for name, part in caches:
        own = [row for row in rows if (row["cache"], row["share"]) == (name, part)]
        lost = [row["nats"] - full[row["document"]] for row in own if row["kind"] == "text"]
        if len(lost) < FEWEST:
            continue
        reading = [row for row in own if row["kind"] == "read"]
        asked = [row for row in own if "right" in row and row["kind"] in kinds]
        yield [
            TITLES.get(name, f"`{name}`"),
            part or ("1" if name == "full" else f"{_memory(rows, reading):.2f}"),
            f"{len(reading)}",
            *(share(row for row in asked if row["kind"] == kind) for kind in kinds),
            share(asked) if len(kinds) > 1 else "",
            "0" if name == "full" else cell(lost, 3, "+"),
            f"{fmean(row['seconds'] for row in reading):.1f}",
            f"{fmean(row['peak'] for row in reading) / 2**20:.1f}",
        ]


def _memory(rows: list[Row], reading: list[Row]) -> float:
    """Bytes at the end, in shares of those of the full cache in 16 bits; models run in 32."""
    full = {row["document"]: row["bytes"] for row in rows if row["cache"] == "full" and row["kind"] == "read"}
    return fmean(row["bytes"] / full[row["document"]] * 2 for row in reading)


def answers(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """How far the predictions of long answers are from the full cache's, a line for each cache.

    Args:
        titles: what to call models.
    """
    found: dict[tuple[str, int], dict[tuple[str, str], dict[int, dict[int, Row]]]] = {}
    for row in rows:
        if row["kind"] == "answer":
            caches = found.setdefault((row["model"], row["length"]), {})
            parts = caches.setdefault((row["cache"], row["share"]), {})
            parts.setdefault(row["question"], {})[row["document"]] = row
    texts = []
    for (model, length), caches in sorted(found.items()):
        body = [
            [TITLES.get(name, f"`{name}`"), part, f"{len(parts[0])}", *(_apart(parts[at].values()) for at in parts)]
            for (name, part), parts in caches.items()
            if len(parts[0]) >= FEWEST
        ]
        if body:
            starts = sorted(next(iter(caches.values())))
            size = starts[1] - starts[0]
            header = ("cache", "memory", "answers", *(f"{at + 1} to {at + size}" for at in starts))
            texts.append(f"{titles.get(model, model)}, behind {length:,} tokens:\n\n{table(header, body)}")
    return "\n\n".join(texts)


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
        kinds = able(own)
        header = ("cache", "memory", "documents", *(KINDS[kind] for kind in kinds), "all")
        body = list(lines(own, kinds))
        if body:
            how = f"in chunks of {chunk}" if chunk else "in one forward"
            made = table((*header, "text: nats lost", "reading, s", "peak, MiB"), body)
            found.append(f"{titles.get(model, model)}, {length:,} tokens {how}:\n\n{made}")
    return "\n\n".join(found)


def ways(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What reading in chunks loses against one forward, by documents that a cache has read in both ways; "" = none.

    Args:
        titles: what to call models.
    """
    found = cells(rows)
    body = []
    for (model, length, chunk), own in sorted(found.items()):
        once = found.get((model, length, 0), [])
        for name, part in dict.fromkeys((row["cache"], row["share"]) for row in once if chunk and row["share"]):
            texts = _pairs(own, once, (name, part), "nats", {"text"})
            asked = _pairs(own, once, (name, part), "right", {*able(own)} & {*able(once)})
            if len(texts) < FEWEST:
                continue
            chunks, whole = (sum(sum(pair[at] for pair in pairs) for pairs in asked.values()) for at in (0, 1))
            number = sum(map(len, asked.values()))
            more = [sum(pair[0] - pair[1] for pair in pairs) for pairs in asked.values()]
            lost = [pair[0] - pair[1] for pairs in texts.values() for pair in pairs]
            body.append(
                [
                    titles.get(model, model),
                    f"{length:,} in {chunk}",
                    f"{TITLES.get(name, f'`{name}`')}, {part}",
                    f"{len(texts)}",
                    f"{chunks}/{number}",
                    f"{whole}/{number}",
                    f"{100 * sum(more) / number:+.1f} ± {100 * stdev(more) * sqrt(len(more)) / number:.1f}",
                    cell(lost, 3, "+"),
                ]
            )
    header = (
        "model",
        "tokens",
        "cache",
        "documents",
        "right in chunks",
        "in one forward",
        "more, %",
        "text: nats lost",
    )
    return table(header, body) if body else ""


def _pairs(
    chunks: list[Row], once: list[Row], cache: tuple[str, str], what: str, kinds: set[str]
) -> dict[int, list[tuple[float, float]]]:
    """By document what a cache has in both ways of reading."""
    ways = [
        {(row["document"], row["kind"], row.get("question")): row[what] for row in rows if row["kind"] in kinds}
        for rows in ([row for row in own if (row["cache"], row["share"]) == cache] for own in (chunks, once))
    ]
    found: dict[int, list[tuple[float, float]]] = {}
    for key in sorted(ways[0].keys() & ways[1].keys(), key=str):
        found.setdefault(key[0], []).append((ways[0][key], ways[1][key]))
    return found
