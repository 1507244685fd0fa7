"""A folder of results survives a crash and refuses to mix runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.results import ResultFolder


def test_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path, {"a": 1})
    folder.append([{"id": 1}, {"id": "ä"}])
    with folder.rows_path.open("ab") as file:
        file.write('{"id": "ä'.encode()[:-1])
    again = ResultFolder(tmp_path, {"a": 1})
    assert again.rows() == [{"id": 1}, {"id": "ä"}]
    again.append([{"id": 3}])
    assert again.rows() == [{"id": 1}, {"id": "ä"}, {"id": 3}]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    ResultFolder(tmp_path, {"a": 1, "b": 2}).append([])
    with pytest.raises(UserError, match=r"b: 2 there, 3 now"):
        ResultFolder(tmp_path, {"a": 1, "b": 3})


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    ResultFolder(tmp_path / "new", {})
    assert not (tmp_path / "new").exists()


def test_rows_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"run_meta\.json"):
        ResultFolder(tmp_path, {})


def test_damage_in_the_middle_is_reported(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path, {})
    folder.append([{"id": 1}])
    folder.rows_path.write_text('{"id"\n{"id": 2}\n')
    with pytest.raises(UserError, match="damaged"):
        folder.rows()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output"):
        ResultFolder(tmp_path / "file" / "below", {}).append([{"id": 1}])
