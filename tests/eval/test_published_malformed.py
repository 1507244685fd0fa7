"""Records of published suites that are not what they should be: each is refused by file, line and reason."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.tasks import suites

#: Task -> its file and a record of it.
RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ruler_data_niah_multiquery": (
        "niah_multiquery.jsonl",
        {"index": 4, "input": "x\nWhat are all?", "outputs": ["7"], "length": 40, "answer_prefix": " They"},
    ),
    "math500": ("math500.jsonl", {"problem": "x?", "answer": "1/2", "unique_id": "a.json", "level": 1}),
    "aime2025": ("aime2025.jsonl", {"question": "x?", "answer": 70}),
}


def load(folder: Path, task: str, content: bytes) -> list[Any]:
    (folder / RECORDS[task][0]).write_bytes(content)
    settings = TaskSettings(policies=("recency",), budgets=("64",), tasks=(task,), data_dir=str(folder))
    return suites.load_samples(task, settings, None, None)


def line(record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("ruler_data_niah_multiquery", {"answer_prefix": None}, "'answer_prefix' is null: Input should be a valid string"),
    ("ruler_data_niah_multiquery", {"length": "40"}, "'length' is \"40\": Input should be a valid integer"),
    ("ruler_data_niah_multiquery", {"outputs": [7]}, "'outputs' is \\[7\\]"),
    ("math500", {"answer": True}, "'answer' is true"),
    ("math500", {"unique_id": None}, "'unique_id' is null"),
    ("math500", {"level": []}, "'level' is \\[\\]"),
    ("aime2025", {"answer": "\ud800"}, "'answer' is"),
]


@pytest.mark.parametrize(("task", "change", "message"), WRONG)
def test_wrong_fields(tmp_path: Path, task: str, change: dict[str, Any], message: str) -> None:
    file, record = RECORDS[task]
    content = line(record) + line(record | {"id": 99, "unique_id": "b", "index": 99} | change)
    with pytest.raises(UserError, match=rf"{file}.*2:.*{message}"):
        load(tmp_path, task, content)


def test_wrong_files(tmp_path: Path) -> None:
    """Of the one reader of lines that all records, predictions and texts come through."""
    task = "ruler_data_niah_multiquery"
    file, record = RECORDS[task]
    good = line(record)
    for content, message in (
        (b"", "there is no record in"),
        (b"\xef\xbb\xbf\n \n", "there is no record in"),
        (gzip.compress(good), f"{file}, line 1: not JSON in UTF-8"),
        (good + b'{"a": "\xe9"}\n', f"{file}, line 2: not JSON in UTF-8"),
        (good[: len(good) // 2], f"{file}, line 1: not JSON"),
        (good + b"null\n", f"{file}, line 2: null is not a record"),
        (b"[" * 100_000, f"{file}, line 1: not JSON"),
        (good + b'{"a": ' + b"9" * 5000 + b"}", f"{file}, line 2: not JSON"),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path, task, content)
    other = json.dumps({**record, "index": 5, "input": "a\u2028b\x85c\x0bd\n?"}, ensure_ascii=False).encode()
    (plain, odd) = load(tmp_path, task, b"\xef\xbb\xbf" + good.replace(b"\n", b"\r\n") + b"\r\n" + other)
    assert plain.context == "x" and odd.prompt.startswith("a\u2028b\x85c\x0bd\n?")


@pytest.mark.parametrize("task", ["ruler_data_niah_multiquery", "math500"])
def test_two_records_of_one_name(tmp_path: Path, task: str) -> None:
    file, record = RECORDS[task]
    with pytest.raises(UserError, match=rf"{file}.*3.*{file}.*1"):
        load(tmp_path, task, line(record) + b"\n" + line(record))
