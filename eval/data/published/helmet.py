"""HELMET (Yen et al. 2024, arXiv 2410.02694): recall, retrieved passages and re-ranking, 8k to 128k tokens.

Three of its seven categories, those whose records the authors publish as files and whose scores need no other model:
recall (JSON values and three tasks of RULER), answers from retrieved passages (Natural Questions, TriviaQA, HotpotQA,
PopQA) and re-ranking (MS MARCO). Each is a task per length, and each length a group, `helmet_8k` to `helmet_128k`.

Prompts are the official ones, shipped next to this module (see NOTICE). The 100 questions that are drawn, the two
demonstrations of each, the lengths of answers and the scores are official too, as for models without a chat template.
What differs: the official script cuts a prompt that is too long at its left end, here it loses its middle; and it stops
an answer at the token of a newline, here the first line of it is scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...tasks import Sample
from ..longbench.records import COUNT, TEXT, Kind, Record
from .helmet_questions import ANSWERS, SHOTS, asked_needles, asked_passages, asked_rankings, asked_values
from .task import Demonstrations, PublishedTask

LENGTHS = ("8k", "16k", "32k", "64k", "128k")
_PROMPTS: dict[str, str] = json.loads((Path(__file__).parent / "helmet.json").read_text("utf-8"))


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


def _sample(task: str, template: str, tokens: int, metric: str, record: Record, index: int) -> Sample:
    before, _, after = template.partition("{context}")
    return Sample(
        id=f"{task}/{index}",
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
        without="get data.tar.gz (34 GB) of the dataset princeton-nlp/HELMET, unpack it, and give --data-dir the "
        "folder data that is in it",
        prompt=template,
        sample=partial(_sample, task, template, tokens, metric),
        **how,
    )


def _passage_task(name: str, length: str, count: int) -> PublishedTask:
    split, depth = ("train", 3 if name == "hotpotqa" else 6) if name != "popqa" else ("test", 6)
    asked = f"{name}-dev-multikilt" if name != "popqa" else "popqa_test"
    shown = f"{name}-{split}-multikilt" if name != "popqa" else "popqa_test"
    rare: dict[str, Kind] = {"s_pop": _POSITIVE} if name == "popqa" else {}
    columns = {"question": TEXT, "answers": ANSWERS, "ctxs": _PASSAGES, **rare}
    return _task(
        name,
        length,
        f"{name}, {count} passages of which few have the answer",
        f"kilt/{asked}_1000_k{count}_dep{depth}.jsonl",
        _PROMPTS["passages"],
        20,
        "answer_within",
        columns=columns,
        shown=Demonstrations((f"kilt/{shown}_1000_k3_dep{depth}.jsonl",), columns),
        choose=partial(asked_passages, bool(rare)),
    )


def _tasks(length: str, pairs: int, passages: int, documents: int) -> Iterator[PublishedTask]:
    needle = {"context": TEXT, "query": TEXT, "type_needle_v": TEXT}
    tokens = int(length.removesuffix("k")) * 1024
    for name, folder, template, limit in (
        ("niah_mk_2", "niah_multikey_2", _PROMPTS["needle"], 50),
        ("niah_mk_3", "niah_multikey_3", _PROMPTS["needle"], 100),
        ("niah_mv", "niah_multivalue", _PROMPTS["needles"], 50),
    ):
        file = f"ruler/{folder}/validation_{tokens}.jsonl"
        how: dict[str, Any] = {"columns": needle, "choose": asked_needles}
        yield _task(name, length, f"RULER's {folder}", file, template, limit, "string_match_all", **how)
    yield _task(
        "json_kv",
        length,
        f"one of {pairs} values in a JSON object",
        f"json_kv/test_k{pairs}_dep6.jsonl",
        _PROMPTS["json_kv"],
        100,
        "value_within",
        columns={"context": TEXT, "question": TEXT, "answer": ANSWERS, "demos": _PAIRS},
        choose=asked_values,
    )
    for name in ("nq", "triviaqa", "hotpotqa", "popqa"):
        yield _passage_task(name, length, passages)
    ranked = {"qid": TEXT, "query": TEXT, "ctxs": _RANKED}
    yield _task(
        "msmarco",
        length,
        f"{documents} documents to be ranked, NDCG@10",
        f"msmarco/test_reranking_data_k{documents}_dep3.jsonl",
        _PROMPTS["ranking"],
        200,
        "ndcg_10",
        columns=ranked,
        shown=Demonstrations(("msmarco/test_reranking_data_k10_dep3.jsonl",), ranked),
        choose=asked_rankings,
    )


#: Length -> pairs of json_kv, retrieved passages, documents to be ranked.
_SIZES = ((105, 50, 50), (220, 105, 130), (440, 220, 285), (900, 440, 600), (1800, 1000, 1000))
GROUPS: dict[str, tuple[PublishedTask, ...]] = {
    f"helmet_{length}": tuple(_tasks(length, *sizes)) for length, sizes in zip(LENGTHS, _SIZES, strict=True)
}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
