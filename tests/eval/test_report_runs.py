"""Result folders read for a report: names, folders without answers, damage."""

import json
import re
from pathlib import Path

import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.report import run_report
from hf_paged_eviction_eval.report.runs import Run, load_runs
from report_rows import FULL, VARIANTS, make_row, make_rows, write_run


def variants(run: Run) -> tuple[tuple[str, str], ...]:
    return tuple(run.frame[["policy", "budget"]].drop_duplicates().itertuples(index=False, name=None))


def test_order_is_that_of_the_settings(tmp_path: Path) -> None:
    rows = sorted(make_rows(["trec", "qasper"]), key=lambda row: str(row["score"]))
    settings = {
        "tasks": ["qasper", "trec"],
        "policies": ["streaming_llm", "paged_eviction"],
        "budgets": ["1024", "256"],
    }
    (run,) = load_runs([write_run(tmp_path, rows, **settings)])
    assert list(run.frame["task"].unique()) == ["qasper", "trec"]
    assert variants(run) == (
        FULL,
        ("streaming_llm", "1024"),
        ("paged_eviction", "1024"),
        ("streaming_llm", "256"),
        ("paged_eviction", "256"),
    )


def test_runs_are_named_by_the_ends_of_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "eval", make_rows(["qasper"])) for name in ("one", "two")]
    assert [run.label for run in load_runs(folders)] == ["one/eval", "two/eval"]
    assert [run.label for run in load_runs(folders[:1])] == [""]


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", make_rows(["qasper"]))
    assert len(load_runs([folder, folder / ".." / "a"])) == 1


def test_a_folder_without_settings_is_read_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path, make_rows(["qasper"]))
    (folder / "run.0.json").unlink()
    (run,) = load_runs([folder])
    assert variants(run) == VARIANTS and any("its settings are unknown" in note for note in run.notes)


def test_no_folder_no_rows_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder.*results"):
        run_report([], None)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "absent"))):
        run_report([tmp_path / "absent"], None)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="`paged-eviction eval`"):
        run_report([empty], None)
    (empty / "rows.0.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="no finished row"):
        run_report([empty], None)
    write_run(empty / "inside", make_rows(["qasper"], [FULL], count=1))
    with pytest.raises(UserError, match=re.escape(str(empty / "inside"))):
        run_report([empty], None)
    assert not (empty / "report").exists()


TEXT = {"text": "t", "policy": "p", "budget": "b", "budget_tokens": 9, "length": 9, "loss": [1, 2], "count": [1, 2]}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (json.dumps(make_row("qasper", FULL, 1, score=None)), "score is None"),
        (json.dumps(make_row("qasper", FULL, 1, score="high")), "score is 'high'"),
        (json.dumps(make_row("qasper", FULL, 1, score=float("nan"))), "score is None"),
        (json.dumps(make_row("qasper", FULL, 1, id=7)), "id is 7"),
        (json.dumps(make_row("qasper", FULL, 1) | {"length": "long"}), "length is 'long'"),
        (json.dumps(make_row("qasper", FULL, 1, budget=["x"])), "budget is"),
        (json.dumps(make_row("qasper", FULL, 1, efficiency={"batch_rows": "2"})), "efficiency.batch_rows is '2'"),
        (json.dumps(make_row("qasper", FULL, 1, agreement=[1])), "agreement is [1]"),
        (json.dumps(make_row("qasper", FULL, 1, metadata="x")), "metadata is 'x'"),
        (json.dumps(make_row("qasper", FULL, 1, record_length="long")), "record_length is 'long'"),
        (json.dumps(TEXT | {"loss": [1]}), "loss and count differ in length"),
        (json.dumps(TEXT | {"loss": 1}), "loss is 1"),
        (json.dumps(TEXT | {"count": [1, None]}), "count is [1, None]"),
        (json.dumps(TEXT | {"length": None}), "length is None"),
        (json.dumps({"text": "t"}), "budget_tokens"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str, reason: str) -> None:
    folder = write_run(tmp_path, [make_row("qasper", FULL, 0)])
    with (folder / "rows.0.jsonl").open("a") as file:
        file.write(damage + "\n")
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        run_report([folder], None)
    assert "rows.0.jsonl, line 2" in str(caught.value)


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", make_rows(["qasper"], [FULL]))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        run_report([folder], tmp_path / "file" / "report")


def test_what_has_no_answers_is_left_out_with_a_note(tmp_path: Path) -> None:
    """`results/*` brings runs without a row, and files."""
    good = write_run(tmp_path / "good", make_rows(["qasper"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("a note")
    runs = load_runs([tmp_path / "empty", good, tmp_path / "note.txt"], skipped := [])
    assert [run.folder for run in runs] == [good]
    assert len(skipped) == 2
    with pytest.raises(UserError, match="no finished row"):
        load_runs([tmp_path / "empty"], [])
    with pytest.raises(UserError, match="nowhere"):
        load_runs([good, tmp_path / "nowhere"], [])
