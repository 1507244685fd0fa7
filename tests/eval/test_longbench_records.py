"""Records that are wrong are refused by file and line, whatever is wrong with them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.data.longbench import TASKS
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.tasks.suites import PUBLISHED
from longbench_files import (
    longbench_record,
    longbench_v2_record,
    write_longbench,
    write_longbench_v2,
    write_longbench_zip,
)


def settings(data_dir: Path | None, **changes: Any) -> TaskSettings:
    where = None if data_dir is None else str(data_dir)
    return TaskSettings(policies=(), budgets=("full",), tasks=("qasper",), data_dir=where, **changes)


def load_samples(task: str, settings: TaskSettings) -> list[Sample]:
    return PUBLISHED[task].samples(settings)


def data_digest(task: str, settings: TaskSettings) -> str:
    return PUBLISHED[task].digests(settings)["data"]


def message(folder: Path, task: str = "qasper") -> str:
    with pytest.raises(UserError) as caught:
        load_samples(task, settings(folder))
    return str(caught.value)


def write_line(folder: Path, line: bytes, task: str = "qasper") -> Path:
    """A good record, then this line."""
    folder.mkdir(exist_ok=True)
    good = json.dumps(longbench_record(task, 0), ensure_ascii=False).encode()
    (folder / f"{task}.jsonl").write_bytes(good + b"\n" + line + b"\n")
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_read(task: str, tmp_path: Path) -> None:
    samples = load_samples(task, settings(write_longbench(tmp_path, [task], per_task=4)))
    assert [sample.id for sample in samples] == [f"{task}-{index:04d}" for index in range(4)]
    assert {sample.task for sample in samples} == {task}
    assert len(load_samples(task, settings(tmp_path, limit=2))) == 2


def test_folder_archive_and_zip_hold_the_same(tmp_path: Path) -> None:
    folder = write_longbench(tmp_path / "folder", ["qasper"])
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "data").symlink_to(folder)
    archive = write_longbench_zip(tmp_path / "any name.zip", ["qasper"])
    (tmp_path / "with_archive").mkdir()
    (tmp_path / "with_archive" / "data.zip").write_bytes(archive.read_bytes())
    places = [folder, tmp_path / "parent", archive, tmp_path / "with_archive"]
    read = [load_samples("qasper", settings(place)) for place in places]
    assert read[0] and all(samples == read[0] for samples in read)
    assert len({data_digest("qasper", settings(place)) for place in places}) == 1


@pytest.mark.parametrize("name", ["longbench_v2.jsonl", "data.json"])
def test_v2_is_read_from_lines_and_from_a_list(name: str, tmp_path: Path) -> None:
    samples = load_samples("longbench_v2", settings(write_longbench_v2(tmp_path, 5, name)))
    assert [sample.id for sample in samples] == [f"v2-{index:04d}" for index in range(5)]
    assert len(data_digest("longbench_v2", settings(tmp_path))) == 64


@pytest.mark.parametrize(
    ("task", "change", "reason"),
    [
        ("qasper", {"answers": []}, "'answers' is []: List should have at least 1 item"),
        ("qasper", {"answers": [1]}, "'answers' is [1]"),
        ("qasper", {"context": None}, "'context' is null: Input should be a valid string"),
        ("qasper", {"length": "3100"}, "'length' is \"3100\": Input should be a valid integer"),
        ("qasper", {"length": True}, "'length'"),
        ("qasper", {"length": -1}, "'length'"),
        ("qasper", {"all_classes": "a"}, "'all_classes'"),
        ("qasper", {"context": "half a character \ud800"}, "'context'"),
        ("qasper", {"_id": "qasper-0000"}, "the same id 'qasper-0000' as in"),
        ("trec", {"all_classes": None}, "'all_classes' is"),
        ("lsht", {"all_classes": []}, "'all_classes' is"),
        ("passage_retrieval_en_e", {"answers": ["7"]}, "'answers' is"),
        ("passage_retrieval_zh", {"answers": ["段落一"]}, "'answers' is"),
        *(("qasper", {column: ...}, f"no column {column!r};") for column in ("_id", "input", "length", "all_classes")),
    ],
)
def test_wrong_values(task: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    record = longbench_record(task, 1) | change
    line = json.dumps({name: value for name, value in record.items() if value is not ...}).encode()
    text = message(write_line(tmp_path, line, task), task)
    assert f"{tmp_path / task}.jsonl, line 2: " in text and reason in text


def test_the_rearranged_schema_is_recognised(tmp_path: Path) -> None:
    record = {"context": "", "question": "", "answer_prefix": "", "answers": ["a"], "all_classes": None, "length": 1}
    text = message(write_line(tmp_path, json.dumps(record).encode()))
    assert "line 2: no column '_id', 'input'" in text and "kvpress" in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "no such folder" in message(tmp_path / "nowhere")
    assert "it holds nothing" in message(tmp_path)
    write_longbench(tmp_path, ["hotpotqa"])
    assert "no qasper.jsonl" in message(tmp_path) and "hotpotqa.jsonl" in message(tmp_path)
    write_longbench_zip(tmp_path / "data.zip", ["musique"])
    text = message(tmp_path)
    assert "no qasper.jsonl there; it holds data.zip, data/musique.jsonl, hotpotqa.jsonl" in text
    assert "it holds data/musique.jsonl" in message(tmp_path / "data.zip")


def test_damaged_archives(tmp_path: Path) -> None:
    """Cut, or bytes overwritten anywhere: the records are the same or it is said which file is damaged."""
    path = write_longbench_zip(tmp_path / "data.zip", ["qasper"], per_task=30)
    whole, expected = path.read_bytes(), load_samples("qasper", settings(tmp_path))
    for share in (0.0, 0.3, 0.97):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert f"cannot read {path}" in message(tmp_path)
    rng, refused = random.Random(0), 0
    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert load_samples("qasper", settings(tmp_path)) == expected
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((content, "") for content in ("{}", "7", "[", "[7]", "[[]]", '[{"_id": "a"}]')),
        ({"answer": "E"}, "record 2: 'answer' is \"E\": Input should be 'A', 'B', 'C' or 'D'"),
        ({"difficulty": "medium"}, "Input should be 'easy' or 'hard'"),
        ({"length": 4000}, "'length' is 4000"),
        ({"choice_C": None}, "'choice_C' is null"),
    ],
)
def test_wrong_records_of_v2(content: Any, reason: str, tmp_path: Path) -> None:
    if isinstance(content, dict):
        content = json.dumps([longbench_v2_record(0), longbench_v2_record(1) | content])
    (tmp_path / "data.json").write_text(content, "utf-8")
    text = message(tmp_path, "longbench_v2")
    assert str(tmp_path / "data.json") in text and reason in text
