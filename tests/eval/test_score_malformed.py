"""Files of predictions that are not what they should be: refused by file, line and reason, or read as they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.report.scoring import score_files

ROW = {
    "task": "qasper",
    "length": None,
    "policy": "recency",
    "budget": "64",
    "id": "a",
    "prediction": "Paris",
    "answers": ["Paris"],
    "metric": "qa_f1",
    "score": 1.0,
    "metadata": {},
}
PRED = {"pred": "Paris", "answers": ["Paris"], "all_classes": None, "length": 500}
FILES: list[tuple[str, Any]] = [
    ("rows.0.jsonl", ROW),
    ("pred_e/qasper.jsonl", PRED),
]


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("score", float("nan"), "'score' is NaN, it must be a number from 0 to 1"),
        ("score", float("inf"), "'score' is Infinity, it must"),
        ("score", 10**400, "'score' is 1000000000.*, it must"),
        ("score", True, "'score' is true, it must be a number from 0 to 1, or null"),
        ("policy", "a\ud800", r"'policy' is \"a\\ud800\", it must be a text"),
        ("task", "a\ud800", r"'task' is \"a\\ud800\", it must be a text"),
        ("budget", None, "'budget' is null, it must be a text"),
        ("length", -1, "'length' is -1, it must be a whole number, or null"),
        ("prediction", None, "'prediction' is null, it must be a text"),
        ("answers", [], r"'answers' is \[\], it must be a list of texts, at least one"),
    ],
)
def test_wrong_fields_of_rows(tmp_path: Path, field: str, value: Any, message: str) -> None:
    rows = [ROW, {**ROW, "id": "b", field: value}]
    path = put(tmp_path, "rows.0.jsonl", "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(UserError, match=rf"rows.0.jsonl.*2: {message}"):
        score_files([path])


def test_negative_lengths_of_longbench_e(tmp_path: Path) -> None:
    path = put(tmp_path, "pred_e/qasper.jsonl", json.dumps({**PRED, "length": -1}).encode())
    with pytest.raises(UserError, match=r"qasper.jsonl.*1: 'length'.*-1"):
        score_files([path])


@pytest.mark.parametrize(("name", "content"), FILES)
def test_files_as_other_systems_write_them(tmp_path: Path, name: str, content: Any) -> None:
    good = json.dumps(content).encode()
    plain = score_files([put(tmp_path, name, good + b"\n")])
    assert plain[0].score == 100 or plain[0].groups == {"0-4k": 100.0, "4-8k": None, "8k+": None}
    assert score_files([put(tmp_path, name, b"\xef\xbb\xbf" + good + b"\r\n")]) == plain
    with pytest.raises(UserError, match=f"{name}"):
        score_files([put(tmp_path, name, gzip.compress(good))])
    with pytest.raises(UserError, match=f"{name}.* not "):
        score_files([put(tmp_path, name, good.decode().encode("utf-16"))])
