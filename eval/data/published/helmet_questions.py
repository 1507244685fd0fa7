"""Which records of HELMET (Yen et al. 2024, arXiv 2410.02694) are asked, and which demonstrations go with each.

Each function takes the records of a file and those to show, and yields one record per question: the fields of its
prompt, and `answers`. All are drawn as by the official `data.py` with its seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ..longbench.records import TEXT, TEXTS, Kind, Record

QUESTIONS, SHOTS, SEED = 100, 2, 42
#: PopQA is asked about what fewer people look up: 10 to this power.
_POPULARITY = 3

ANSWERS = Kind(
    "a text, a list of texts or a list of such lists",
    lambda value: TEXT.accepts(value) or TEXTS.accepts(value) or (isinstance(value, list) and _nested(value)),
)


def _nested(value: list[Any]) -> bool:
    return bool(value) and all(map(TEXTS.accepts, value))


def _flat(answers: Any) -> list[str]:
    if isinstance(answers, str):
        return [answers]
    return [each for answer in answers for each in ([answer] if isinstance(answer, str) else answer)]


def _order(count: int, seed: int) -> list[int]:
    """The order into which the library `datasets` shuffles so many rows."""
    import numpy

    return [int(index) for index in numpy.random.default_rng(seed).permutation(count)]


def _shuffled(records: Sequence[Record]) -> list[Record]:
    return [records[index] for index in _order(len(records), SEED)[:QUESTIONS]]


def _drawn(records: Sequence[Record], key: str) -> list[Record]:
    keys = sorted({record[key] for record in records})
    chosen = set(random.Random(SEED).sample(keys, min(QUESTIONS, len(keys))))
    return [record for record in records if record[key] in chosen]


def _demonstrations(record: Record, demos: Sequence[Record], key: str) -> list[Record]:
    """Two records with different keys, in an order that the key of the question decides."""
    seed = int(hashlib.sha256(str(record[key]).encode()).hexdigest(), 16) % 2**31
    found: dict[Any, Record] = {}
    for index in _order(len(demos), seed):
        found.setdefault(demos[index][key], demos[index])
    if len(found) < SHOTS:
        raise ValueError(f"there are {len(found)} demonstrations, a prompt has {SHOTS}")
    return list(found.values())[:SHOTS]


def _refuse_mixed(key: str, records: Sequence[Record]) -> None:
    kinds = {type(record.get(key)) for record in records}
    if len(kinds) > 1 or not kinds <= {str, int}:
        found = ", ".join(sorted("none" if kind is type(None) else kind.__name__ for kind in kinds))
        raise ValueError(f"the records are told apart by {key!r}, which is to be all texts or all numbers, not {found}")


def asked_passages(rare: bool, records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    if rare:
        records, demos = (
            [each for each in every if math.log10(each["s_pop"]) < _POPULARITY] for every in (records, demos)
        )
    key = "id" if records and "id" in records[0] else "question"
    _refuse_mixed(key, [*records, *demos])
    for record in _drawn(records, key):
        # PopQA has no other records to show than those that it asks.
        others = [each for each in demos if each[key] != record[key]] if rare else demos
        shown = (
            f"{_passages(each)}\n\nQuestion: {each['question']}\nAnswer: {_flat(each['answers'])[0]}\n\n"
            for each in _demonstrations(record, others, key)
        )
        yield {
            "demos": "".join(shown),
            "context": _passages(record),
            "question": record["question"],
            "answers": _flat(record["answers"]),
        }


def _passages(record: Record) -> str:
    return "\n\n".join(f"Document (Title: {each['title']}): {each['text']}" for each in record["ctxs"])


def asked_rankings(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    records = _drawn(records, "qid")
    asked = {record["qid"] for record in records}
    many = len(demos) > 2 * len(records)
    for record in records:
        avoided = asked if many else {record["qid"]}
        others = [each for each in demos if each["qid"] not in avoided]
        titled = "title" in record["ctxs"][0]
        shown = (
            f"{_documents(each, titled)}\n\nQuery: {each['query']}\nRanking: {_ranking(each)}\n\n"
            for each in _demonstrations(record, others, "qid")
        )
        yield {
            "demos": "".join(shown),
            "context": _documents(record, titled),
            "question": record["query"],
            "answers": [json.dumps({each["id"]: each["label"] for each in record["ctxs"]})],
        }


def _documents(record: Record, titled: bool) -> str:
    return "\n\n".join(
        f"[ID: {each['id']}] Document{_title(each) if titled else ''}: {each['text']}" for each in record["ctxs"]
    )


def _title(document: Record) -> str:
    return f" (Title: {document.get('title', '')})"


def _ranking(record: Record) -> str:
    best = sorted(record["ctxs"], key=lambda each: each["label"], reverse=True)
    return " > ".join(each["id"] for each in best)


def asked_values(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    for record in _shuffled(records):
        shown = (f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in record["demos"][:SHOTS])
        yield {**record, "demos": "".join(shown), "answers": _flat(record["answer"])}


def asked_needles(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    for record in _shuffled(records):
        answers = record["answer"] if "answer" in record else record.get("outputs")
        if not ANSWERS.accepts(answers):
            raise ValueError(f"'answer' or 'outputs' is {answers!r:.40}, it must be {ANSWERS.what}")
        yield {**record, "answers": _flat(answers)}
