"""LooGLE (Li et al. 2023, arXiv 2311.04939): questions about documents of 24,000 words and more, written after 2022.

Prompts and lengths of answers are the official tables, shipped unchanged next to this module (see NOTICE); prompts are
not put into a chat template. Every question of a document is a sample of its own, so with `--question-agnostic` all of
them share one compressed context.

Scores are official automatic ones: for the three tasks with sentences as answers the recall of ROUGE-L (long answers
are not punished, so compare runs of one length), for clozes the share of masks that were named exactly. The others are
got from the answers of a run by `paged-eviction score FOLDER --metric`: `rouge_1_recall`, `rouge_2_recall`, `bleu_1`,
`bleu_4`, `meteor` and `bert_score`, and `cloze_partial`, which counts a common word. The official number of clozes
divides the sums over all questions; a mean here counts each question the same. GPT-4 as a judge is left out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...tasks import Sample
from ..longbench.records import TEXT, Record
from .task import PublishedTask

_TABLE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "loogle.json").read_text("utf-8"))
_SUMMARY, _CLOZE = "longdep_summarization", "shortdep_cloze"


def _sample(name: str, record: Record, index: int) -> Sample:
    before, _, after = _TABLE[name]["prompt"].partition("{input}")
    answer = record["answer"]
    return Sample(
        id=f"loogle_{name}/{index}",
        task=f"loogle_{name}",
        context=before.format() + record["input"],
        question=after.format(Q=record["question"]),
        answers=(json.dumps(answer, ensure_ascii=False) if isinstance(answer, dict) else answer,),
        max_new_tokens=_TABLE[name]["max_new_tokens"],
        metadata={"title": str(record["title"])} | ({"type": record["type"]} if record["type"] else {}),
        metric="cloze_exact" if name == _CLOZE else "rouge_l_recall",
    )


def _questions(name: str, record: Record) -> Iterator[Record]:
    """One record per question, whose field `qa_pairs` is a text that Python reads."""
    title, text = record["title"], record["input"]
    if name == _SUMMARY:
        yield {"input": text, "title": title, "question": "", "answer": record["output"], "type": ""}
        return
    try:
        pairs = ast.literal_eval(record["qa_pairs"])
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("'qa_pairs' is no list of questions") from error
    is_answer = _is_named if name == _CLOZE else _is_text
    for pair in pairs if isinstance(pairs, list) and pairs else [None]:
        if not (isinstance(pair, dict) and isinstance(pair.get("Q"), str) and is_answer(pair.get("A"))):
            raise ValueError(f"in 'qa_pairs' {pair!r:.40} is no question with an answer")
        kind = str(pair.get("type", ""))
        yield {"input": text, "title": title, "question": pair["Q"], "answer": pair["A"], "type": kind}


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str)


def _is_named(answer: Any) -> bool:
    return isinstance(answer, dict) and bool(answer) and all(isinstance(each, str) for each in answer.values())


def _task(name: str, description: str) -> PublishedTask:
    split: Callable[[Record], Iterator[Record]] = partial(_questions, name)
    return PublishedTask(
        name=f"loogle_{name}",
        description=f"LooGLE, {name}: {description}.",
        files=(f"{name}.jsonl",),
        hub=None,
        without=f"get {name}.jsonl of LooGLE (https://github.com/bigai-nlco/LooGLE has five documents of each task in "
        "LooGLE-testdata, and says where all of them are) and give --data-dir its folder",
        columns={"input": TEXT, "title": TEXT, "output" if name == _SUMMARY else "qa_pairs": TEXT},
        prompt=_TABLE[name]["prompt"],
        sample=partial(_sample, name),
        split=split,
    )


TASKS = (
    _task("shortdep_qa", "questions whose evidence is in one place, recall of ROUGE-L"),
    _task("longdep_qa", "questions whose evidence is spread over the text, recall of ROUGE-L"),
    _task(_CLOZE, "names that were masked, share of them that is right"),
    _task(_SUMMARY, "abstracts of papers, recall of ROUGE-L"),
)
