"""Records that are wrong are refused by file and line, whatever is wrong with them."""

from __future__ import annotations

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
    write_records,
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
    ("change", "reason"),
    [
        ({"answers": []}, "'answers' is [], it must be a list of texts, at least one"),
        ({"answers": [1]}, "'answers' is [1]"),
        ({"context": None}, "'context' is null, it must be a text"),
        ({"input": 3}, "'input' is 3"),
        ({"length": "3100"}, "'length' is \"3100\", it must be a whole number"),
        ({"length": True}, "'length'"),
        ({"length": -1}, "'length'"),
        ({"all_classes": "a"}, "'all_classes'"),
        ({"_id": 7}, "'_id' is 7"),
        ({"context": "half a character \ud800"}, "'context'"),
        ({"_id": "qasper-0000"}, "the same id 'qasper-0000' as in"),
    ],
)
def test_wrong_values(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    record = longbench_record("qasper", 1) | change
    text = message(write_line(tmp_path, json.dumps(record).encode()))
    assert f"{tmp_path / 'qasper.jsonl'}, line 2: " in text and reason in text


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("trec", {"all_classes": None}),
        ("lsht", {"all_classes": []}),
        ("passage_retrieval_en_e", {"answers": ["7"]}),
        ("passage_retrieval_zh", {"answers": ["段落一"]}),
    ],
)
def test_values_that_a_metric_cannot_score(task: str, change: dict[str, Any], tmp_path: Path) -> None:
    line = json.dumps(longbench_record(task, 1) | change).encode()
    assert f"line 2: {next(iter(change))!r} is" in message(write_line(tmp_path, line, task), task)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    for column in ("_id", "input", "context", "answers", "length", "all_classes"):
        record = longbench_record("qasper", 1)
        del record[column]
        assert f"line 2: no column {column!r};" in message(write_line(tmp_path, json.dumps(record).encode()))


def test_the_rearranged_schema_is_recognised(tmp_path: Path) -> None:
    record = {"context": "", "question": "", "answer_prefix": "", "answers": ["a"], "all_classes": None, "length": 1}
    text = message(write_line(tmp_path, json.dumps(record).encode()))
    assert "line 2: no column '_id', 'input'" in text and "kvpress" in text


def test_empty_files(tmp_path: Path) -> None:
    for content in (b"", b"\n\n", b"\xef\xbb\xbf\r\n \r\n"):
        (tmp_path / "qasper.jsonl").write_bytes(content)
        assert message(tmp_path) == f"{tmp_path / 'qasper.jsonl'} is empty"


def test_byte_order_mark_line_ends_and_blank_lines(tmp_path: Path) -> None:
    lines = [json.dumps(longbench_record("multifieldqa_zh", k), ensure_ascii=False).encode() for k in range(3)]
    (tmp_path / "multifieldqa_zh.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines))
    plain = load_samples("multifieldqa_zh", settings(write_longbench(tmp_path / "plain", ["multifieldqa_zh"])))
    assert load_samples("multifieldqa_zh", settings(tmp_path)) == plain


def test_other_line_ends_inside_of_texts(tmp_path: Path) -> None:
    context = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1eseven\r\neight"
    write_records(tmp_path / "qasper.jsonl", [longbench_record("qasper", 0) | {"context": context}])
    (sample,) = load_samples("qasper", settings(tmp_path))
    assert sample.context.endswith(context)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "no such folder" in message(tmp_path / "nowhere")
    assert "it holds nothing" in message(tmp_path)
    write_longbench(tmp_path, ["hotpotqa"])
    assert "no qasper.jsonl" in message(tmp_path) and "hotpotqa.jsonl" in message(tmp_path)
    write_longbench_zip(tmp_path / "data.zip", ["musique"])
    assert f"{tmp_path / 'data.zip'}: no qasper.jsonl in that zip file; it holds data/musique.jsonl" in message(
        tmp_path
    )


def test_names_in_archives_are_told_apart(tmp_path: Path) -> None:
    archive = write_longbench_zip(tmp_path / "data.zip", ["qasper", "qasper_e"])
    assert load_samples("qasper_e", settings(archive))[0].id == "qasper_e-0000"


def test_damaged_archives(tmp_path: Path) -> None:
    """Cut, or bytes overwritten anywhere: the records are the same or it is said which file is damaged."""
    path = write_longbench_zip(tmp_path / "data.zip", ["qasper"], per_task=30)
    whole, expected = path.read_bytes(), load_samples("qasper", settings(tmp_path))
    for share in (0.0, 0.3, 0.97):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert f"{path} is not a whole zip file" in message(tmp_path)
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
    ("change", "reason"),
    [
        ({"answer": "E"}, "'answer' is \"E\", it must be one of A, B, C, D"),
        ({"answer": "AB"}, "'answer'"),
        ({"difficulty": "medium"}, "it must be one of easy, hard"),
        ({"length": 4000}, "'length' is 4000"),
        ({"choice_C": None}, "'choice_C' is null"),
    ],
)
def test_wrong_values_of_v2(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([longbench_v2_record(0), longbench_v2_record(1) | change]), "utf-8")
    text = message(tmp_path, "longbench_v2")
    assert f"{tmp_path / 'data.json'}, record 2: " in text and reason in text


@pytest.mark.parametrize("content", ["{}", "7", "[", "[7]", "[[]]", '[{"_id": "a"}]'])
def test_wrong_lists_of_v2(content: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content, "utf-8")
    assert str(tmp_path / "data.json") in message(tmp_path, "longbench_v2")
