"""A folder of results survives a crash and refuses to mix runs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.store import lock
from hf_paged_eviction_eval.store.results import ResultFolder, Row, RowFile, encode_row, read_rows

SETTINGS = {"a": 1, "b": [2, "ä"]}


def key_of(row: Row) -> tuple[Any, ...]:
    return (row["id"],)


def folder_of(path: Path, settings: dict[str, Any] = SETTINGS, part: str = "") -> ResultFolder:
    return ResultFolder(path, settings, key_of, part=part)


def written(path: Path, *rows: Row) -> ResultFolder:
    with folder_of(path).opened() as folder:
        folder.add(rows)
    return folder


def reopened(path: Path) -> tuple[list[Row], list[str]]:
    with folder_of(path).opened() as folder:
        return list(folder.rows.values()), folder.notes


def test_rows_come_back_at_once_and_later(tmp_path: Path) -> None:
    rows = [{"id": 1}, {"id": "ä\u2028\n"}]
    with folder_of(tmp_path).opened() as folder:
        folder.add(rows[:1])
        assert read_rows(tmp_path, key_of) == (rows[:1], [])
        folder.add(rows)
        assert read_rows(tmp_path, key_of) == (rows, [])
    assert reopened(tmp_path) == (rows, [])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cut=st.integers(0, 200), data=st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path: Path, cut: int, data: st.DataObject) -> None:
    path = tmp_path / str(data.draw(st.uuids()))
    rows = [{"id": index, "text": "größer\n"} for index in range(5)]
    folder = written(path, *rows)
    content = folder.rows_path.read_bytes()
    cut = min(cut, len(content))
    folder.rows_path.write_bytes(content[:cut])
    whole = rows[: content[:cut].count(b"\n")]
    assert read_rows(path, key_of)[0] == whole  # looking changes nothing
    assert folder.rows_path.read_bytes() == content[:cut]
    found, notes = reopened(path)
    assert found == whole
    assert bool(notes) == (content[:cut][-1:] not in (b"", b"\n"))
    written(path, *rows[len(whole) :])
    assert reopened(path) == (rows, [])


def test_rows_written_twice_count_once_and_are_named(tmp_path: Path) -> None:
    written(tmp_path, {"id": 1, "x": "first"}, {"id": 2})
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(encode_row({"id": 1, "x": "second"}))
    rows, (note,) = read_rows(tmp_path, key_of)
    assert rows == [{"id": 1, "x": "first"}, {"id": 2}]
    assert "1 rows are there twice" in note and str(tmp_path / "results.jsonl") in note
    assert reopened(tmp_path) == (rows, [note])
    assert reopened(tmp_path) == (rows, [])


def test_rows_of_other_processes_are_taken_in(tmp_path: Path) -> None:
    written(tmp_path, {"id": 1})
    with folder_of(tmp_path, part="2-of-2").opened() as shard:
        shard.add([{"id": 2}, {"id": 1}])
        assert reopened(tmp_path)[0] == [{"id": 1}, {"id": 2}] and shard.rows_path.exists(), "it is being written"
        shard.add([{"id": 4}])
    with shard.rows_path.open("ab") as file:
        file.write(encode_row({"id": 1}) + b'{"id": 3')
    old = tmp_path / "results.rank00001.jsonl"  # of an earlier version
    old.write_bytes(encode_row({"id": 5}))
    rows, notes = reopened(tmp_path)
    assert rows == [{"id": 1}, {"id": 2}, {"id": 4}, {"id": 5}] and len(notes) == 2
    assert not shard.rows_path.exists() and not old.exists()
    assert reopened(tmp_path) == (rows, [])


def test_half_a_line_is_dropped_while_others_write(tmp_path: Path) -> None:
    written(tmp_path, {"id": 1})
    with folder_of(tmp_path, part="2-of-2").opened():
        with (tmp_path / "results.jsonl").open("ab") as file:
            file.write(b'{"id": 2')
        with folder_of(tmp_path).opened() as folder:
            assert "cut off" in folder.notes[0]
            folder.add([{"id": 3}])
    assert reopened(tmp_path) == ([{"id": 1}, {"id": 3}], [])


def test_other_settings_are_refused_line_by_line(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError) as caught:
        folder_of(tmp_path, {"a": 1, "b": [3], "c": None, "d": True}).check()
    lines = str(caught.value).splitlines()
    assert lines[1:3] == ["  b: [2, 'ä'] there, [3] now", "  d: None there, True now"]
    assert "another --output" in lines[-1] and "run.yaml" in lines[-1]


def test_nothing_is_written_before_it_begins(tmp_path: Path) -> None:
    folder_of(tmp_path / "new", {}).check()
    assert not (tmp_path / "new").exists()


def test_rows_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"run_meta\.json"):
        folder_of(tmp_path, {}).check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"settings": 1}', b"\xff\xfe", b"[" * 100_000])
def test_damaged_settings_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run_meta.json").write_bytes(content)
    with pytest.raises(UserError, match=r"run_meta\.json is damaged.*another --output"):
        folder_of(tmp_path, {}).check()


@pytest.mark.parametrize(
    "line",
    [b"", b'{"id"', b"[]", b"1", b"null", b"{}", b'{"id": [1]}', b'{"id": {}}', b"\xff", b"\0\0", b"[" * 100_000],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    folder = written(tmp_path, {"id": 1})
    with folder.rows_path.open("ab") as file:
        file.write(line + b'\n{"id": 2}\n')
    for read in (lambda: reopened(tmp_path), lambda: read_rows(tmp_path, key_of)):
        with pytest.raises(UserError, match=r"results\.jsonl, line 2 is damaged") as caught:
            read()
        assert len(str(caught.value)) < 1000


def test_lines_are_strict_json_whatever_is_in_a_row() -> None:
    line = encode_row({"kl": float("nan"), "x": [float("inf"), (1.5, {"y": -float("inf")})], "s": "\ud800", "e": "é"})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kl": None,
        "x": [None, [1.5, {"y": None}]],
        "s": "\ud800",
        "e": "é",
    }
    assert encode_row({"e": "é"}) == '{"e": "é"}\n'.encode()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output"):
        written(tmp_path / "file" / "below")


def test_a_second_process_is_refused_and_a_dead_one_is_not_waited_for(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from hf_paged_eviction_eval.store import lock
with lock.held(Path({str(tmp_path)!r}, "results.jsonl")):
    print("held", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    rows, other = tmp_path / "results.jsonl", tmp_path / "results.2-of-2.jsonl"
    assert lock.held_elsewhere(other) and not lock.held_elsewhere(rows)
    with pytest.raises(UserError, match="another process is writing to"), lock.held(rows):
        pass
    process.kill()
    process.communicate()
    with lock.held(rows):
        assert lock.held_elsewhere(other)
    assert not lock.held_elsewhere(other)


def test_a_full_disk_loses_no_row_and_keeps_no_half(tmp_path: Path) -> None:
    folder = written(tmp_path, {"id": 1, "text": "x" * 100})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = folder.rows_path.stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
        with pytest.raises(UserError, match=r"cannot write .*results\.jsonl.*the same command continues"):
            written(tmp_path, {"id": 2}, {"id": 3, "text": "x" * 100})
        with pytest.raises(UserError, match=r"run_meta\.json"):
            folder.write_meta({"long": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*.partial"))
    assert [row["id"] for row in read_rows(tmp_path, key_of)[0]] == [1]
    written(tmp_path, {"id": 2})
    assert reopened(tmp_path)[1] == [] and [row["id"] for row in reopened(tmp_path)[0]] == [1, 2]


def test_a_device_without_room(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    rows.path.symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        rows.append([{"id": 1}])
