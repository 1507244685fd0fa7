"""Files that kvpress's evaluation command writes: tables of pandas, whose lists are what numpy prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.report.scoring import TaskScore, score_files
from hf_paged_eviction_eval.store.kvpress import texts

pandas = pytest.importorskip("pandas")
FOLDER = "longbench__qasper__meta-llama--Llama-3.1-8B-Instruct__snapkv__0.75"


def array(*values: str) -> Any:
    return np.array(values, dtype=object)


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As kvpress does: all columns but the context, in any order, without an index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pandas.DataFrame([{"context": "c", "question": "q", "max_new_tokens": 148, **row} for row in rows])
    frame[sorted(set(frame.columns) - {"context"})].to_csv(path, index=False)
    return path


def row(predicted: str | None, *answers: str, task: str = "qasper", **more: Any) -> dict[str, Any]:
    record = {"task": task, "predicted_answer": predicted, "answers": array(*answers), "all_classes": None}
    return record | {"length": 3100, "compression_ratio": 0.75} | more


def scores(entries: list[TaskScore]) -> dict[str, float | None]:
    return {entry.task: entry.score for entry in entries}


def test_a_run_over_longbench(tmp_path: Path) -> None:
    rows = [row("in Paris", "Rome", "Paris"), row('the "Old\nTown"', 'It\'s the "Old Town"'), row(None, "y")]
    path = save(tmp_path / FOLDER / "predictions.csv", rows)
    (entry,) = score_files([path])
    assert (entry.task, entry.metric, entry.samples) == ("qasper", "qa_f1", 3)
    assert (entry.policy, entry.budget) == ("snapkv", "25%")
    assert entry.score == round(100 * (2 / 3 + 0.8 + 0) / 3, 2)
    assert score_files([tmp_path])[0] == score_files([path.parent])[0] == entry
    assert score_files([path], longbench_e=True)[0].groups == {"0-4k": entry.score, "4-8k": None, "8k+": None}
    again = save(
        tmp_path / FOLDER.replace("longbench__qasper", "longbench-e__qasper_e") / "1" / "predictions.csv", rows
    )
    assert score_files([again])[0].task == "qasper_e" and score_files([again])[0].policy == "snapkv"


def test_classes_and_first_lines(tmp_path: Path) -> None:
    rows = [row("\nPlace\nType: Person", "Place", task="trec", all_classes=array("Place", "Person"))] * 2
    assert scores(score_files([save(tmp_path / "predictions.csv", rows)])) == {"trec": 100.0}


def test_a_run_over_ruler(tmp_path: Path) -> None:
    """All tasks stand in one file, and the column is called `answer`."""
    rows = [
        {"task": task, "predicted_answer": "7 and X", "answer": array("7", "8", "x"), "compression_ratio": 0.5}
        for task in ("niah_multivalue", "qa_1", "vt")
    ]
    entries = score_files([save(tmp_path / "ruler__4096__m__knorm__0.50" / "predictions.csv", rows)])
    expected = {"ruler_data_niah_multivalue": 66.67, "ruler_data_qa_1": 100.0, "ruler_data_vt": 66.67}
    assert scores(entries) == expected and {entry.budget for entry in entries} == {"50%"}


@pytest.mark.parametrize(
    "values",
    [
        ["a"], ["a", "b"], ["It's", 'say "x"', "both ' and \""], ["a b", "", " "], ["[x]", "(y), 'z'", "..."],
        ["back\\slash", "new\nline", "tab\t", "\x00\x1b"], ["段落7", "\u2028", "é\U0001f600"],
        [str(n) for n in range(300)], ["word " * 300] * 9, ["array(['a'])", "dtype=object", "np.str_('a')"],
    ],
)  # fmt: skip
def test_lists_come_back_as_they_were(values: list[str]) -> None:
    shown = [
        str(array(*values)),
        repr(array(*values)),
        str(values),
        json.dumps(values),
        str([np.str_(v) for v in values]),
    ]
    assert [texts(text, "") for text in shown] == [values] * 5


@pytest.mark.parametrize(
    "cell",
    ["", "Paris", "[]", "[1 2]", "['a'", "'a'", "['a' b]", "['a', 7]", "[['a'], ['b']]x", "{'a'}", "['\\x1']", "[nan]",
     "['a' + 'b']", "__import__('os')", "['a'].pop()", str(array(*map(str, range(1001)))), "[null]", '["a", 1]'],
)  # fmt: skip
def test_what_is_no_list_is_refused_with_the_way_out(cell: str) -> None:
    with pytest.raises(UserError, match=re.escape("file.csv, row 3: 'answers'") + ".*map\\(json.dumps\\)"):
        texts(cell, "file.csv, row 3: 'answers'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no predictions"),
        (b"task,predicted_answer,answers\n", "holds no predictions"),
        (b"a,b\n1,2\n", "row 1 has no 'task'"),
        (b"task,predicted_answer,answers\nqasper,x\n", "row 1 has no 'answers'"),
        (b"task,predicted_answer,answers\nqasper,x,y\n", "row 1: 'answers' is 'y', which is no list"),
        (b"task,predicted_answer,answers\nlongdep_qa,x,['y']\n", "task 'longdep_qa' of kvpress has no metric here"),
        (b"task,predicted_answer,answers\nqasper_e,x,['y']\n", "row 1: 'length' is null, it must be a whole number"),
        (b"task,predicted_answer,answers\ntrec,x,['y']\n", "row 1: metric 'classification' needs all_classes"),
        (b'task,predicted_answer,answers\nqasper,"x\n', "is not CSV"),
        (b"task\xff", "is not CSV in UTF-8"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "predictions.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        score_files([tmp_path / "predictions.csv"])
