"""Files in the format of HELMET, made up by rule; the digests in `tests/data/helmet.json` are of their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WORDS = "stone river lamp green seven oak bread north quiet paper glass wolf".split()
RECORDS = 130


def _text(seed: int, count: int) -> str:
    return " ".join(_WORDS[(seed * 7 + step * (seed % 5 + 1)) % len(_WORDS)] for step in range(count))


def questions(count: int, identity: str | None, shift: int) -> list[dict[str, Any]]:
    """Records of retrieved passages; `identity` is "text", "number" (each twice, with a popularity) or None."""
    found: list[dict[str, Any]] = []
    for index in range(count):
        passages = [{"title": _text(shift + index + n, 1), "text": _text(shift + 3 * index + n, 4)} for n in range(3)]
        record: dict[str, Any] = {
            "question": f"Who is {_text(shift + index, 2)} {index}?",
            "answers": [_text(shift + index, 1), _text(index, 2)],
            "ctxs": passages,
        }
        if identity == "text":
            record["id"] = f"q{index}"
        if identity == "number":
            record |= {"id": index // 2, "s_pop": (5, 50, 999, 1000, 20000)[index % 5]}
        found.append(record)
    return found


def rankings(count: int, documents: int, titled: bool, shift: int) -> list[dict[str, Any]]:
    """Records of documents to be ranked."""
    return [
        {
            "qid": str(1000 + shift + index),
            "query": f"what is {_text(index, 2)}",
            "ctxs": [
                {"id": str(100 * index + 7 * n), "text": _text(index + n, 3), "label": (index + n) % 4 % 3}
                | ({"title": _text(n, 1)} if titled else {})
                for n in range(documents)
            ],
        }
        for index in range(count)
    ]


def values(count: int) -> list[dict[str, Any]]:
    """Records of keys and values."""
    return [
        {
            "context": f'JSON data:\n{{"a{index}": "v-{index}"}}',
            "question": f"a{index}",
            "answer": f"v-{index}",
            "demos": [[f"x{n}{index}", f"y{n}"] for n in range(3)],
            "num_kvs": 105,
        }
        for index in range(count)
    ]


def needles(count: int) -> list[dict[str, Any]]:
    """Records of RULER, as HELMET keeps them."""
    return [
        {
            "context": f"{_text(index, 9)} {index}",
            "query": _text(index, 2),
            "type_needle_v": "numbers",
            "answer": [f"{index}00", f"{index}01"],
            "index": index,
        }
        for index in range(count)
    ]


def write(folder: Path) -> None:
    """All files of the length 8k."""
    files: dict[str, list[dict[str, Any]]] = {
        "kilt/nq-dev-multikilt_1000_k50_dep6": questions(RECORDS, None, 0),
        "kilt/nq-train-multikilt_1000_k3_dep6": questions(20, None, 500),
        "kilt/triviaqa-dev-multikilt_1000_k50_dep6": questions(RECORDS, "text", 1),
        "kilt/triviaqa-train-multikilt_1000_k3_dep6": questions(21, "text", 501),
        "kilt/hotpotqa-dev-multikilt_1000_k50_dep3": questions(RECORDS, "text", 2),
        "kilt/hotpotqa-train-multikilt_1000_k3_dep3": questions(22, "text", 502),
        "kilt/popqa_test_1000_k50_dep6": questions(RECORDS, "number", 3),
        "kilt/popqa_test_1000_k3_dep6": questions(RECORDS, "number", 3),
        "msmarco/test_reranking_data_k50_dep3": rankings(RECORDS, 12, True, 0),
        "msmarco/test_reranking_data_k10_dep3": rankings(RECORDS, 4, True, 50),
        "json_kv/test_k105_dep6": values(RECORDS),
        **{
            f"ruler/{name}/validation_8192": needles(RECORDS)
            for name in ("niah_multikey_2", "niah_multikey_3", "niah_multivalue")
        },
    }
    for name, records in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
