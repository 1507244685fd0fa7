# ruff: noqa: RUF001 - Chinese text has Chinese punctuation
"""Tiny files in the format of LongBench, all 21 tasks, the 13 of LongBench-E and v2, made up here."""

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.data.longbench import TASKS

Record = dict[str, Any]

_PLACES = "harbour mill bridge tower orchard station library garden".split()
_PEOPLE = "Ada Bruno Clara Denis Edith Farid Greta Hugo".split()
_CLASSES = ["Place", "Person", "Number of something", "Reason"]
_CLASSES_ZH = ["体育", "农业、农村", "财经", "军事"]
#: Words: one record in every bucket of LongBench-E, in turns.
LENGTHS = (3100, 6200, 9300)


def _story(index: int, lines: int = 4) -> str:
    sentences = []
    for line in range(lines):
        person, place = _PEOPLE[(index + line) % 8], _PLACES[(3 * index + line) % 8]
        sentences.append(f"{person} walked to the {place} and counted {index * 7 + line} boats.")
    return " ".join(sentences)


def _story_zh(index: int, lines: int = 4) -> str:
    return "".join(
        f"第{index * 7 + line}天，小{'明红华'[line % 3]}去了图书馆，读了{line + 2}本书。" for line in range(lines)
    )


def _qa(index: int) -> Record:
    person, place = _PEOPLE[index % 8], _PLACES[3 * index % 8]
    return {
        "context": "\n\n".join(f"Passage {k + 1}:\n{_story(index + k)}" for k in range(3)),
        "input": f"Where did {person} walk to first?",
        "answers": [f"The {place}", f"to the {place}."],
    }


def _qa_zh(index: int) -> Record:
    return {"context": _story_zh(index, 8), "input": "小明去了哪里？", "answers": ["图书馆。", "他去了图书馆"]}


def _summary_zh(index: int) -> Record:
    return _qa_zh(index) | {"input": ""}


def _summary(index: int) -> Record:
    return {"context": _story(index, 9), "input": "", "answers": [f"People counted {index * 7} boats. They walked."]}


def _classify(index: int) -> Record:
    shots = "\n".join(f"Question: {_story(index + k, 1)}\nType: {_CLASSES[k % 4]}" for k in range(4))
    return {
        "context": shots,
        "input": f"Question: Who is {_PEOPLE[index % 8]} ?\nType:",
        "answers": ["Person"],
        "all_classes": _CLASSES,
    }


def _classify_zh(index: int) -> Record:
    shots = "\n".join(f"新闻内容：{_story_zh(index + k, 1)}\n类别：{_CLASSES_ZH[k % 4]}" for k in range(4))
    return {
        "context": shots,
        "input": f"新闻内容：{_story_zh(index, 2)}\n类别：",
        "answers": ["财经"],
        "all_classes": _CLASSES_ZH,
    }


def _dialogue(index: int) -> Record:
    shots = "\n\n".join(
        f"Dialogue: {_PEOPLE[k]}: Are you at the {_PLACES[k]}?\r\n{_PEOPLE[k + 1]}: Yes.\nSummary: "
        f"{_PEOPLE[k + 1]} is at the {_PLACES[k]}."
        for k in range(index % 3, index % 3 + 2)
    )
    return {
        "context": shots,
        "input": f"Dialogue: {_PEOPLE[index % 8]}: Tea?\r\n{_PEOPLE[(index + 1) % 8]}: Please.\nSummary: ",
        "answers": [f"{_PEOPLE[(index + 1) % 8]} would like some tea."],
    }


def _count(index: int) -> Record:
    return _retrieve(index) | {"input": "", "answers": ["3"]}


def _retrieve(index: int) -> Record:
    return {
        "context": "\n\n".join(f"Paragraph {k + 1}: {_story(index + k, 2)}" for k in range(4)),
        "input": f"A walk of {_PEOPLE[(index + 2) % 8]}.",
        "answers": ["Paragraph 3"],
    }


def _retrieve_zh(index: int) -> Record:
    paragraphs = "\n\n".join(f"段落{k + 1}：{_story_zh(index + k, 2)}" for k in range(4))
    return {"context": paragraphs, "input": "读书的一天。", "answers": ["段落2"]}


def _code(index: int) -> Record:
    return {
        "context": f"import math\n\n\ndef area_{index}(radius: float) -> float:\n    square = radius ** 2\n",
        "input": "",
        "answers": ["    return math.pi * square"],
        "language": "python",
    }


_TASKS_OF: dict[Callable[[int], Record], str] = {
    _qa: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique qmsum triviaqa",
    _dialogue: "samsum",
    _qa_zh: "multifieldqa_zh dureader",
    _summary: "gov_report multi_news",
    _summary_zh: "vcsum",
    _classify: "trec",
    _classify_zh: "lsht",
    _retrieve: "passage_retrieval_en",
    _retrieve_zh: "passage_retrieval_zh",
    _code: "lcc repobench-p",
    _count: "passage_count",
}
_MAKERS = {task: maker for maker, tasks in _TASKS_OF.items() for task in tasks.split()}


def longbench_record(task: str, index: int) -> Record:
    """Record `index` of a task, in the official schema."""
    base = TASKS[task].base
    common = {
        "input": "",
        "length": LENGTHS[index % 3],
        "dataset": base,
        "language": "zh" if TASKS[task].language == "zh" else "en",
        "all_classes": None,
        "_id": f"{task}-{index:04d}",
    }
    return common | _MAKERS[base](index)


def write_longbench(folder: Path, tasks: Sequence[str] | None = None, per_task: int = 3) -> Path:
    """`<task>.jsonl` for each of these tasks (None: all 34) in `folder`, which is made and returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS if tasks is None else tasks:
        write_records(folder / f"{task}.jsonl", [longbench_record(task, index) for index in range(per_task)])
    return folder


def write_longbench_zip(path: Path, tasks: Sequence[str] | None = None, per_task: int = 3) -> Path:
    """The same as the official archive: `data/<task>.jsonl` in a zip file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for task in TASKS if tasks is None else tasks:
            lines = (json.dumps(longbench_record(task, index), ensure_ascii=False) for index in range(per_task))
            archive.writestr(f"data/{task}.jsonl", "".join(f"{line}\n" for line in lines))
    return path


def longbench_v2_record(index: int) -> Record:
    """Record `index` of LongBench v2, in the official schema."""
    return {
        "_id": f"v2-{index:04d}",
        "domain": ("Single-Document QA", "Code Repository Understanding")[index % 2],
        "sub_domain": "Literary",
        "difficulty": ("easy", "hard")[index % 2],
        "length": ("short", "medium", "long")[index % 3],
        "question": f"Who walked first in story {index}?",
        **{f"choice_{letter}": _PEOPLE[(index + k) % 8] for k, letter in enumerate("ABCD")},
        "answer": "ABCD"[index % 4],
        "context": _story(index, 9),
    }


def write_longbench_v2(folder: Path, count: int = 4, name: str = "longbench_v2.jsonl") -> Path:
    """`longbench_v2.jsonl`, or `data.json` as one list, in `folder`, which is made and returned."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [longbench_v2_record(index) for index in range(count)]
    if name.endswith(".jsonl"):
        write_records(folder / name, records)
    else:
        (folder / name).write_text(json.dumps(records), "utf-8")
    return folder


def write_records(path: Path, records: Sequence[Record]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
