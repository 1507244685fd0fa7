"""Tables across lengths, and across ways of reading, of the rows of `long_rows.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import fmean, stdev

from common import cell, table
from long_documents import KINDS
from long_tables import FEWEST, Row, able, caches_of, cells, memory, share, title


def by_length(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What each cache answers in chunks, a table for each model, two columns for each length.

    Args:
        titles: what to call models; their order, too.
    """
    found = []
    for model, own in _in_chunks(rows, titles).items():
        header = ["cache", "memory"]
        for length, of_length in own.items():
            header += [f"{length:,}, {len(_texts(of_length, ('full', '')))} documents", "nats lost"]
        body = []
        for name, part in caches_of(row for of_length in own.values() for row in of_length):
            line = [entry for of_length in own.values() for entry in _entry(of_length, (name, part))]
            if any(line):
                body.append([title(name), part or _memory(own, name), *line])
        found.append(f"{titles.get(model, model)}:\n\n{table(header, body)}")
    return "\n\n".join(found)


def by_kind(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What each cache answers in chunks of each kind of questions, over all lengths at which it was measured; what it
    costs at the longest. A table for each model that answers more than one kind.

    Args:
        titles: what to call models; their order, too.
    """
    found = []
    for model, own in _in_chunks(rows, titles).items():
        asked = [
            {**row, "document": (length, row["document"])}
            for length, of_length in own.items()
            for kinds in [able(of_length)]
            for row in of_length
            if row["kind"] in kinds and "right" in row
        ]
        kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in asked)]
        longest = max(own)
        header = ("cache", "memory", *(KINDS[kind] for kind in kinds), "reading, s", "peak, MiB")
        body = []
        for one in caches_of(asked):
            if all(len(_texts(of_length, one)) >= FEWEST for of_length in own.values()):
                reading = [row for row in own[longest] if row["kind"] == "read" and _is_of(row, one)]
                right = (share(row for row in asked if _is_of(row, one) and row["kind"] == kind) for kind in kinds)
                cost = (f"{fmean(row[name] for row in reading) / per:.0f}" for name, per in _COSTS.items())
                body.append([title(one[0]), one[1] or _memory(own, one[0]), *right, *cost])
        if len(kinds) > 1:
            where = (
                f"{len(own)} lengths; seconds and bytes of {longest:,} tokens"
                if len(own) > 1
                else f"{longest:,} tokens"
            )
            found.append(f"{titles.get(model, model)}, {where}:\n\n{table(header, body)}")
    return "\n\n".join(found)


#: Of a document that was read, and of what it is told in.
_COSTS = {"seconds": 1, "peak": 2**20}


def _in_chunks(rows: Iterable[Row], titles: Mapping[str, str]) -> dict[str, dict[int, list[Row]]]:
    """Rows by model and length, of lengths at which enough documents were read in chunks."""
    found: dict[str, dict[int, list[Row]]] = {model: {} for model in titles}
    for (model, length, chunk), own in sorted(cells(rows).items()):
        if chunk and len(_texts(own, ("full", ""))) >= FEWEST:
            found.setdefault(model, {})[length] = own
    return {model: own for model, own in found.items() if own}


def _is_of(row: Row, one: tuple[str, str]) -> bool:
    return (row["cache"], row["share"]) == one


def _texts(rows: Iterable[Row], one: tuple[str, str]) -> dict[int, float]:
    """Nats of the text that follows, by document."""
    return {row["document"]: row["nats"] for row in rows if row["kind"] == "text" and _is_of(row, one)}


def _entry(rows: list[Row], one: tuple[str, str]) -> tuple[str, str]:
    """Right answers of all kinds, and nats lost; "" = too few documents."""
    full, own = _texts(rows, ("full", "")), _texts(rows, one)
    if len(own) < FEWEST:
        return "", ""
    kinds = able(rows)
    right = share(row for row in rows if "right" in row and row["kind"] in kinds and _is_of(row, one))
    return right, "0" if one[0] == "full" else cell((nats - full[at] for at, nats in own.items()), 3, "+")


def _memory(own: Mapping[int, list[Row]], name: str) -> str:
    """The share of the memory that a cache has which has no size of its own, at the longest text."""
    length = max(length for length, rows in own.items() if len(_texts(rows, (name, ""))) >= FEWEST)
    return memory(own[length], [row for row in own[length] if row["kind"] == "read" and row["cache"] == name])


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
                    f"{title(name)}, {part}",
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
