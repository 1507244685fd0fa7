"""Tables across lengths, and across ways of reading, of the rows of `long_rows.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from statistics import stdev

from common import cell
from long_documents import KINDS
from long_tables import FEWEST, FULL, Cache, Row, able, cache_of, cells, in_order, lines, of_cache, share, shown, title

#: What a document that is read takes.
_COSTS = ("reading, s", "peak, MiB")
#: Rows, and the lines of caches, by length.
_Lengths = tuple[dict[int, list[Row]], dict[int, dict[Cache, dict[str, str]]]]


def by_length(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What each cache answers in chunks, two columns for each length.

    Args:
        titles: what to call models; their order, too.
    """
    found = _in_chunks(rows, titles)
    lengths = sorted({length for _, made in found.values() for length in made})
    body = []
    for model, (_, made) in found.items():
        read = ", ".join(made[length][FULL]["documents"] if length in made else "-" for length in lengths)
        name = f"{titles.get(model, model)}: {read} documents"
        for one in in_order(one for of_length in made.values() for one in of_length):
            longest = made[max(length for length, of_length in made.items() if one in of_length)][one]
            line = {"model": name, "cache": longest["cache"], "memory": longest["memory"]}
            for length in lengths:
                of_one = made.get(length, {}).get(one, {})
                line[f"right, {length:,}"] = of_one.get("all kinds", "")
                line[f"nats lost, {length:,}"] = of_one.get("text: nats lost", "")
            body.append(line)
            name = ""
    return shown(body)


def by_kind(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What each cache answers in chunks of each kind of questions, over all lengths at which it was measured; what it
    costs at the longest. Of models that answer more than one kind.

    Args:
        titles: what to call models; their order, too.
    """
    body = []
    for model, (own, made) in _in_chunks(rows, titles).items():
        asked = [
            {**row, "document": (length, row["document"])}
            for length, of_length in own.items()
            for kinds in [able(of_length)]
            for row in of_length
            if row["kind"] in kinds
        ]
        if len({row["kind"] for row in asked}) > 1:
            longest = made[max(made)]
            name = f"{titles.get(model, model)}: {min(own):,} to {max(own):,} tokens"
            for one in longest:
                if all(one in of_length for of_length in made.values()):
                    of_one = of_cache(asked, one)
                    right = {KINDS[kind]: share(row for row in of_one if row["kind"] == kind) for kind in KINDS}
                    of_longest = {column: longest[one][column] for column in ("cache", "memory", *_COSTS)}
                    body.append({"model": name} | of_longest | right)
                    name = ""
    return shown(body) if body else ""


def _in_chunks(rows: Iterable[Row], titles: Mapping[str, str]) -> dict[str, _Lengths]:
    """Rows and lines by model and length, of lengths at which enough documents were read in chunks."""
    found: dict[str, _Lengths] = {model: ({}, {}) for model in titles}
    for (model, length, chunk), own in sorted(cells(rows).items()):
        if chunk and FULL in (made := lines(own)):
            of_model = found.setdefault(model, ({}, {}))
            of_model[0][length], of_model[1][length] = own, made
    return {model: both for model, both in found.items() if both[0]}


def ways(rows: Iterable[Row], titles: Mapping[str, str] = {}) -> str:
    """What reading in chunks loses against one forward, by documents that a cache has read in both ways; "" = none.

    Args:
        titles: what to call models.
    """
    found = cells(rows)
    body = []
    for (model, length, chunk), own in sorted(found.items()):
        once = found.get((model, length, 0), [])
        for one in dict.fromkeys(cache_of(row) for row in once if chunk and row["share"]):
            texts = _pairs(own, once, one, "nats", {"text"})
            asked = _pairs(own, once, one, "right", {*able(own)} & {*able(once)})
            if len(texts) < FEWEST:
                continue
            chunks, whole = (sum(sum(pair[at] for pair in pairs) for pairs in asked.values()) for at in (0, 1))
            number = sum(map(len, asked.values()))
            more = [sum(pair[0] - pair[1] for pair in pairs) for pairs in asked.values()]
            lost = [pair[0] - pair[1] for pairs in texts.values() for pair in pairs]
            body.append(
                {
                    "model": titles.get(model, model),
                    "tokens": f"{length:,} in {chunk}",
                    "cache": f"{title(one[0])}, {one[1]}",
                    "documents": f"{len(texts)}",
                    "right in chunks": f"{chunks}/{number}",
                    "in one forward": f"{whole}/{number}",
                    "more, %": f"{100 * sum(more) / number:+.1f} ± {100 * stdev(more) * sqrt(len(more)) / number:.1f}",
                    "text: nats lost": cell(lost, 3, "+"),
                }
            )
    return shown(body) if body else ""


def _pairs(
    chunks: list[Row], once: list[Row], one: Cache, what: str, kinds: set[str]
) -> dict[int, list[tuple[float, float]]]:
    """By document what a cache has in both ways of reading."""
    ways = [
        {
            (row["document"], row["kind"], row.get("question")): row[what]
            for row in of_cache(own, one)
            if row["kind"] in kinds
        }
        for own in (chunks, once)
    ]
    found: dict[int, list[tuple[float, float]]] = {}
    for key in sorted(ways[0].keys() & ways[1].keys(), key=str):
        found.setdefault(key[0], []).append((ways[0][key], ways[1][key]))
    return found
