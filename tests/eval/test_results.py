"""A folder of results: rows of many processes and settings, whatever ended them."""

import json
import os
import resource
import subprocess
import sys
import uuid
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.store.results import (
    ResultFolder,
    Row,
    delete_halves,
    encode_row,
    read_folder,
    settings_differences,
    settings_digest,
)
from processes import raw_rows

SETTINGS = {"a": 1, "b": [2, "ä"]}


def key_of(row: Row) -> tuple[Any, ...]:
    if not isinstance(row["id"], int | str):
        raise TypeError("id")
    return (row["id"],)


def folder_of(path: Path, meaning: dict[str, Any] = SETTINGS, **more: Any) -> ResultFolder:
    return ResultFolder(path, {"": meaning}, key_of, **more)


def written(path: Path, *rows: Row, meaning: dict[str, Any] = SETTINGS) -> ResultFolder:
    folder = folder_of(path, meaning)
    folder.add(rows)
    folder.write_meta({})
    return folder


def ids(path: Path, meaning: dict[str, Any] = SETTINGS) -> list[Any]:
    return [row["id"] for row in folder_of(path, meaning).rows.values()]


def file_of(folder: ResultFolder) -> Path:
    return folder.path / f"rows.{folder.id}.jsonl"


def test_rows_come_back_at_once_and_later(tmp_path: Path) -> None:
    digest = settings_digest(SETTINGS)
    folder = folder_of(tmp_path)
    folder.add([{"id": 1}])
    assert raw_rows(tmp_path) == [{"id": 1, "settings": digest}]
    folder.add([{"id": 1}, {"id": "ä\u2028\n"}])
    assert ids(tmp_path) == [1, "ä\u2028\n"] and len(raw_rows(tmp_path)) == 2
    assert json.loads((tmp_path / "settings" / f"{digest}.json").read_text("utf-8")) == SETTINGS


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cut=st.integers(0, 300))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path: Path, cut: int) -> None:
    path = Path(mkdtemp(dir=tmp_path))
    file = file_of(written(path, *({"id": index, "text": "größer\n"} for index in range(5))))
    content = file.read_bytes()[:cut]
    file.write_bytes(content)
    whole = list(range(content.count(b"\n")))
    assert ids(path) == whole and file.read_bytes() == content
    written(path, *({"id": index} for index in range(5)))
    assert ids(path) == [0, 1, 2, 3, 4]


def test_every_process_has_a_file_and_nobody_waits(tmp_path: Path) -> None:
    """Two at once, one of which computes what the other has: the first of equal rows counts."""
    one, other = folder_of(tmp_path), folder_of(tmp_path)
    one.add([{"id": 1, "by": "one"}])
    other.add([{"id": 1, "by": "other"}, {"id": 2, "by": "other"}])
    assert one.lines_of_others() == 2
    one.read()
    assert [row["by"] for row in one.rows.values()] == ["one", "other"]
    assert len(list(tmp_path.glob("rows.*.jsonl"))) == 2 and ids(tmp_path) == [1, 2]


def test_rows_of_other_settings_stay_and_are_told(tmp_path: Path) -> None:
    written(tmp_path, {"id": 1}, {"id": 2})
    changed = {"a": 1, "b": [3], "c": None, "d": True}
    assert ids(tmp_path, changed) == []
    folder = folder_of(tmp_path, changed)
    folder.add([{"id": 1}])
    assert settings_differences(folder) == [
        "2 rows here are of other settings and stay where they are (b: [2, 'ä'] there, [3] now, d: None there, "
        "True now)"
    ]
    folder.write_meta({})
    assert ids(tmp_path) == [1, 2] and ids(tmp_path, changed) == [1]
    rows, _, notes = read_folder(tmp_path, key_of)
    assert [row["settings"] for row in rows.values()] == [settings_digest(changed)] and "2 rows are of other" in notes[
        0
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": [}'])
def test_settings_that_are_damaged_are_written_again(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, {"id": 1})
    (file,) = (tmp_path / "settings").iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    other = folder_of(tmp_path, {"a": 2})
    assert settings_differences(other) == ["1 rows here are of other settings and stay where they are"]
    assert ids(tmp_path) == [1] and file.read_bytes() == whole


def test_policies_that_are_made_of_files_have_settings_of_their_own(tmp_path: Path) -> None:
    """A file that changes makes its own rows anew, and no others; a report shows the newest."""

    def run(digest: str, by: str) -> None:
        meanings = {"": SETTINGS, "made": {**SETTINGS, "files": digest}}
        folder = ResultFolder(tmp_path, meanings, lambda row: (row["policy"],))
        folder.add([{"policy": "plain", "by": by}, {"policy": "made", "by": by}])
        folder.write_meta({})

    run("x", "first")
    run("y", "second")
    assert len(raw_rows(tmp_path)) == 3
    rows = read_folder(tmp_path, lambda row: (row["policy"],))[0].values()
    assert {row["policy"]: row["by"] for row in rows} == {"plain": "first", "made": "second"}


def test_a_prompt_that_changed_is_asked_again(tmp_path: Path) -> None:
    for digest in ("x", "x", "y"):
        folder = folder_of(tmp_path, prompt_of={(1,): digest}.get)
        folder.add([{"id": 1}])
        assert [row["prompt"] for row in folder.rows.values()] == [digest]
        folder.write_meta({})
    assert len(raw_rows(tmp_path)) == 2
    assert [row["prompt"] for row in read_folder(tmp_path, key_of)[0].values()] == ["y"]


@pytest.mark.parametrize(
    "line",
    [b"", b'{"id"', b"[]", b"1", b"null", b"{}", b'{"id": [1]}', b'{"id": {}}', b"\xff", b"\0\0", b"[" * 100_000],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    folder = written(tmp_path, {"id": 1})
    if line.startswith(b'{"id": ') or line == b"{}":
        settings_of_it = b'"settings": "%s"' % settings_digest(SETTINGS).encode()
        line = line[:-1] + (b", " if b":" in line else b"") + settings_of_it + b"}"
    with file_of(folder).open("ab") as file:
        file.write(line + b'\n{"id": 2}\n')
    for read in (lambda: ids(tmp_path), lambda: read_folder(tmp_path, key_of)):
        with pytest.raises(UserError, match=r"2.*damaged") as caught:
            read()
        assert len(str(caught.value)) < 1000


def test_a_row_of_other_settings_may_be_anything(tmp_path: Path) -> None:
    with file_of(written(tmp_path, {"id": 1})).open("ab") as file:
        file.write(b'{"id": [1], "settings": "other"}\n')
    assert ids(tmp_path) == [1]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"digests": 1}', b'{"digests": {}}', b"[" * 100_000])
def test_what_was_asked_may_be_damaged(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, {"id": 1})
    (file,) = tmp_path.glob("run.*.json")
    file.write_bytes(content)
    rows, meta, notes = read_folder(tmp_path, key_of)
    assert [row["id"] for row in rows.values()] == [1] and meta == {} and "is damaged" in notes[0]
    assert ids(tmp_path) == [1]


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


def test_what_a_killed_process_was_writing_is_deleted(tmp_path: Path) -> None:
    """Of this machine alone, and only once the process is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f".run.json.a1.{uuid.getnode():x}-{pid}.partial" for pid in (gone.pid, os.getpid())]
    names.append(f".run.json.a1.{uuid.getnode() + 1:x}-{gone.pid}.partial")
    for name in names:
        (tmp_path / name).write_text("{")
    delete_halves(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}


def test_a_full_disk_loses_no_row_and_keeps_no_half(tmp_path: Path) -> None:
    written(tmp_path, {"id": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = folder_of(tmp_path)
    folder.add([{"id": 2, "text": "x" * 100}])
    size = file_of(folder).stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
        with pytest.raises(UserError, match="to continue"):
            folder.add([{"id": 3}, {"id": 4, "text": "x" * 100}])
        with pytest.raises(UserError, match=r"run\..*\.json"):
            folder.write_meta({"long": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file_of(folder).stat().st_size == size
    assert not list(tmp_path.glob(".*.partial")) and ids(tmp_path) == [1, 2]
