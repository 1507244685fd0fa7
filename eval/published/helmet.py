"""HELMET (Yen et al. 2024, arXiv 2410.02694): recall, answers from retrieved passages, and re-ranking, 8k to 128k tokens.

Three of its seven categories, those whose records the authors publish as files and whose scores need no other model:
recall (JSON values and three tasks of RULER), answers from retrieved passages (Natural Questions, TriviaQA, HotpotQA,
PopQA) and re-ranking (MS MARCO). Each is a task per length, and each length a group, `helmet_8k` to `helmet_128k`.

Prompts, the 100 questions that are drawn, the two demonstrations of each, the lengths of answers and the scores are the
official ones for models without a chat template. What differs: the official script cuts a prompt that is too long at
its left end, here it loses its middle; and it stops an answer at the token of a newline, here its first line is scored.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..longbench.records import COUNT, TEXT, TEXTS, Kind, Record
from ..tasks import Sample
from .task import Demonstrations, PublishedTask

LENGTHS = ("8k", "16k", "32k", "64k", "128k")
QUESTIONS, SHOTS, SEED = 100, 2, 42
#: PopQA is asked about what fewer people look up: 10 to this power.
_POPULARITY = 3

_RAG = "Use the given documents to write a concise and short answer to the question. Write your answer in the following format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}\nAnswer:"  # noqa: E501
_RANK = "You are provided with a list of documents, each indicated by their ID. Rank each document based on their relevance to the question in descending order from most relelvant to least relevant texts. Include all documents in the rankings. Write your answer using the unique IDs, with the following format:\nRanking: ID3 > ID1 > ID2\n\n{demos}{context}\n\nQuery: {question}\nRanking:"  # noqa: E501
_VALUE = "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n{demos}Key: {question}\nCorresponding value:"  # noqa: E501
_NEEDLE = "A special magic {type_needle_v} is hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat is the special magic {type_needle_v} for {query} mentioned in the provided text?\nThe special magic {type_needle_v} for {query} mentioned in the provided text is"  # noqa: E501
_NEEDLES = "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?\nThe special magic {type_needle_v} for {query} mentioned in the provided text are"  # noqa: E501


def _are_passages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_passage, value))


def _is_passage(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("text"), str) and isinstance(value.get("title"), str)


def _are_ranked(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_ranked, value))


def _is_ranked(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in ("id", "text"))
        and isinstance(value.get("title", ""), str)
        and COUNT.accepts(value.get("label"))
    )


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= SHOTS and all(map(_is_pair, value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


_PASSAGES = Kind("a list of passages with title and text", _are_passages)
_RANKED = Kind("a list of documents with id, text and label", _are_ranked)
_PAIRS = Kind(f"a list of {SHOTS} or more pairs of texts", _are_pairs)
_POSITIVE = Kind("a whole number above 0", lambda value: COUNT.accepts(value) and value > 0)
_ANSWERS = Kind(
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


def _asked_passages(rare: bool, records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    if rare:
        records, demos = (
            [each for each in every if math.log10(each["s_pop"]) < _POPULARITY] for every in (records, demos)
        )
    key = "id" if records and "id" in records[0] else "question"
    for record in _drawn(records, key):
        # PopQA has no other records to show than those that it asks.
        others = [each for each in demos if each[key] != record[key]] if rare else demos
        shown = (
            f"{_passages(each)}\n\nQuestion: {each['question']}\nAnswer: {_flat(each['answers'])[0]}\n\n"
            for each in _demonstrations(record, others, key)
        )
        yield {
            "id": record[key],
            "demos": "".join(shown),
            "context": _passages(record),
            "question": record["question"],
            "answers": _flat(record["answers"]),
        }


def _passages(record: Record) -> str:
    return "\n\n".join(f"Document (Title: {each['title']}): {each['text']}" for each in record["ctxs"])


def _asked_rankings(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
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
            "id": record["qid"],
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


def _asked_values(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    for record in _shuffled(records):
        shown = (f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in record["demos"][:SHOTS])
        yield {**record, "demos": "".join(shown), "answers": _flat(record["answer"])}


def _asked_needles(records: Sequence[Record], demos: Sequence[Record]) -> Iterator[Record]:
    for record in _shuffled(records):
        answers = record["answer"] if "answer" in record else record.get("outputs")
        if not _ANSWERS.accepts(answers):
            raise ValueError(f"'answer' or 'outputs' is {answers!r:.40}, it must be {_ANSWERS.what}")
        yield {**record, "answers": _flat(answers)}


def _sample(task: str, template: str, tokens: int, metric: str, record: Record, index: int) -> Sample:
    before, _, after = template.partition("{context}")
    return Sample(
        id=f"{task}/{record.get('id', index)}",
        task=task,
        context=before.format(**record) + record["context"],
        question=after.format(**record),
        answers=tuple(record["answers"]),
        max_new_tokens=tokens,
        metric=metric,
    )


def _task(
    name: str, length: str, about: str, file: str, template: str, tokens: int, metric: str, **how: Any
) -> PublishedTask:
    task = f"helmet_{name}_{length}"
    return PublishedTask(
        name=task,
        description=f"HELMET, {length}: {about}.",
        files=(file,),
        hub=None,
        without="get data.tar.gz (34 GB) of the dataset princeton-nlp/HELMET, unpack it, and give --data-dir its folder "
        "data",
        prompt=template,
        sample=partial(_sample, task, template, tokens, metric),
        **how,
    )


def _passage_task(name: str, length: str, count: int) -> PublishedTask:
    split, depth = ("train", 3 if name == "hotpotqa" else 6) if name != "popqa" else ("test", 6)
    asked = f"{name}-dev-multikilt" if name != "popqa" else "popqa_test"
    shown = f"{name}-{split}-multikilt" if name != "popqa" else "popqa_test"
    rare: dict[str, Kind] = {"s_pop": _POSITIVE} if name == "popqa" else {}
    columns = {"question": TEXT, "answers": _ANSWERS, "ctxs": _PASSAGES, **rare}
    return _task(
        name,
        length,
        f"{name}, {count} passages of which few have the answer",
        f"kilt/{asked}_1000_k{count}_dep{depth}.jsonl",
        _RAG,
        20,
        "answer_within",
        columns=columns,
        shown=Demonstrations((f"kilt/{shown}_1000_k3_dep{depth}.jsonl",), columns),
        choose=partial(_asked_passages, bool(rare)),
    )


def _tasks(length: str, pairs: int, passages: int, documents: int) -> Iterator[PublishedTask]:
    needle = {"context": TEXT, "query": TEXT, "type_needle_v": TEXT}
    tokens = int(length.removesuffix("k")) * 1024
    for name, folder, template, limit in (
        ("niah_mk_2", "niah_multikey_2", _NEEDLE, 50),
        ("niah_mk_3", "niah_multikey_3", _NEEDLE, 100),
        ("niah_mv", "niah_multivalue", _NEEDLES, 50),
    ):
        file = f"ruler/{folder}/validation_{tokens}.jsonl"
        how: dict[str, Any] = {"columns": needle, "choose": _asked_needles}
        yield _task(name, length, f"RULER's {folder}", file, template, limit, "string_match_all", **how)
    yield _task(
        "json_kv",
        length,
        f"one of {pairs} values in a JSON object",
        f"json_kv/test_k{pairs}_dep6.jsonl",
        _VALUE,
        100,
        "value_within",
        columns={"context": TEXT, "question": TEXT, "answer": _ANSWERS, "demos": _PAIRS},
        choose=_asked_values,
    )
    for name in ("nq", "triviaqa", "hotpotqa", "popqa"):
        yield _passage_task(name, length, passages)
    ranked = {"qid": TEXT, "query": TEXT, "ctxs": _RANKED}
    yield _task(
        "msmarco",
        length,
        f"{documents} documents to be ranked, NDCG@10",
        f"msmarco/test_reranking_data_k{documents}_dep3.jsonl",
        _RANK,
        200,
        "ndcg_10",
        columns=ranked,
        shown=Demonstrations(("msmarco/test_reranking_data_k10_dep3.jsonl",), ranked),
        choose=_asked_rankings,
    )


#: Length -> pairs of json_kv, retrieved passages, documents to be ranked.
_SIZES = ((105, 50, 50), (220, 105, 130), (440, 220, 285), (900, 440, 600), (1800, 1000, 1000))
GROUPS: dict[str, tuple[PublishedTask, ...]] = {
    f"helmet_{length}": tuple(_tasks(length, *sizes)) for length, sizes in zip(LENGTHS, _SIZES, strict=True)
}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
