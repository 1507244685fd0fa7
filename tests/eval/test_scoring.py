"""Prediction files, of this package and of LongBench's `pred.py`, are scored as officially; damage is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.data.longbench.tasks import TASKS
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.report.scoring import TaskScore, means, run_score, score_files

Rows = list[dict[str, Any]]


def official(pred: str, *answers: str, length: int = 100, **changes: Any) -> dict[str, Any]:
    return {"pred": pred, "answers": list(answers), "all_classes": None, "length": length} | changes


def own(prediction: str, answer: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    row = {"task": "qasper", "length": None, "policy": "full", "budget": "full", "id": f"r{index}", "metadata": {}}
    row |= {"prediction": prediction, "answers": [answer], "all_classes": None, "record_length": 100}
    return row | {"metric": "qa_f1", "score": 0.0} | changes


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def score(path: Path, **options: Any) -> TaskScore:
    (entry,) = score_files([path], **options)
    return entry


def test_official_file(tmp_path: Path) -> None:
    rows = [official("in Paris", "Rome", "Paris"), official("x", "y"), official("\u2028 Rome\x85", "Rome")]
    entry = score(write(tmp_path / "qasper.jsonl", rows))
    assert (entry.task, entry.metric, entry.samples) == ("qasper", "qa_f1", 3)
    assert entry.score == round(100 * (2 / 3 + 0 + 1) / 3, 2) == 55.56
    assert (entry.groups, entry.recorded, entry.repeated) == (None, None, 0)


@pytest.mark.parametrize("task", [name for name in TASKS if not name.endswith("_e")])
def test_first_line_counts_in_four_tasks(tmp_path: Path, task: str) -> None:
    if TASKS[task].language == "zh":
        pytest.importorskip("jieba")
    answer = {"retrieval": "Paragraph 7", "retrieval_zh": "段落7"}.get(TASKS[task].metric, "7")
    rows = [official("\n\n1\n7", answer, all_classes=["7", "1"])]
    value = score(write(tmp_path / f"{task}.jsonl", rows)).score
    assert value is not None
    # Code is scored on its first line by its metric.
    assert (value == 0) == (task in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))


@pytest.mark.parametrize(
    "where", ["pred_e/model/qasper.jsonl", "pred_e/qasper.jsonl", "qasper_e.jsonl", "flag/qasper.jsonl"]
)
def test_buckets_of_longbench_e(tmp_path: Path, where: str) -> None:
    rows = [
        official("a1", "a1", length=3999),
        official("b", "a1", length=0),
        official("a1", "a1", length=4000),
        official("a1", "a1", length=7999),
    ]
    entry = score(write(tmp_path / where, rows), longbench_e=where.startswith("flag"))
    assert entry.task == "qasper_e"
    assert entry.score is None
    assert entry.groups == {"0-4k": 50.0, "4-8k": 100.0, "8k+": None}
    assert score(write(tmp_path / "pred" / "qasper.jsonl", rows)).groups is None


def test_rows_of_this_package(tmp_path: Path) -> None:
    rows = [
        own("Paris", "Paris", 1, score=1.0),
        own("Rome", "Paris", 2, score=1.0),
        own("Paris", "Paris", 1, policy="keydiff", budget="25%"),
        own("key 12345.", "12345", 1, task="passkey", length=512, metric="first_number", record_length=None),
        own("A\nB", "A", 1, task="trec", metric="classification", all_classes=["A", "B"]),
        own("a b", "b", 1, task="niah", metric="string_match_all", record_length=None),
    ]
    write(tmp_path / "rows.0.jsonl", rows)
    write(tmp_path / "other.jsonl", [{"nothing": "to read"}])
    entries = score_files([tmp_path])
    assert [(it.task, it.length, it.policy, it.budget, it.samples, it.score) for it in entries] == [
        ("qasper", None, "full", "full", 2, 50.0),
        ("qasper", None, "keydiff", "25%", 1, 100.0),
        ("passkey", 512, "full", "full", 1, 100.0),
        ("trec", None, "full", "full", 1, 100.0),
        ("niah", None, "full", "full", 1, 100.0),
    ]
    assert entries[0].recorded == 100.0


def test_parts_of_a_run_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "rows.0.jsonl", [own("x", "x", 1)])
    write(tmp_path / "rows.1.jsonl", [own("x", "y", 2)])
    assert [it.score for it in score_files([tmp_path])] == [50.0]
    write(tmp_path / "rows.2.jsonl", [own("y", "y", 2)])  # the newest counts
    assert [it.score for it in score_files([tmp_path])] == [100.0]


def test_rows_of_longbench_e(tmp_path: Path) -> None:
    rows = [own("x", "x", index, task="qasper_e", record_length=5000 * index) for index in range(2)]
    assert score(write(tmp_path / "rows.0.jsonl", rows)).groups == {"0-4k": 100.0, "4-8k": 100.0, "8k+": None}
    write(tmp_path / "rows.0.jsonl", [own("x", "x", task="qasper_e", record_length=None)])
    with pytest.raises(UserError, match="line 1"):
        score_files([tmp_path])
    write(tmp_path / "rows.0.jsonl", [own("x", "x", task="passkey", metric="qa_f1")])
    with pytest.raises(UserError, match=r"'passkey'.*LongBench-E"):
        score_files([tmp_path], longbench_e=True)


def test_groups_of_longbench_v2(tmp_path: Path) -> None:
    kinds = [("easy", "short", "A"), ("hard", "long", "B"), ("hard", "short", "A")]
    rows = [
        own(f"The correct answer is ({letter})", "A", index, task="longbench_v2", metric="multiple_choice")
        | {"metadata": {"difficulty": difficulty, "length": length}}
        for index, (difficulty, length, letter) in enumerate(kinds)
    ]
    groups = score(write(tmp_path / "rows.0.jsonl", rows)).groups
    assert groups == {"overall": 66.7, "easy": 100.0, "hard": 50.0, "short": 100.0, "medium": None, "long": 0.0}


def test_choices_of_another_task_have_no_groups(tmp_path: Path) -> None:
    rows = [own("The correct answer is (A)", "A", task="exam", metric="multiple_choice")]
    entry = score(write(tmp_path / "rows.0.jsonl", rows))
    assert (entry.score, entry.groups) == (100.0, None)
    chosen = score(write(tmp_path / "rows.0.jsonl", [own("A", "A")]), metrics=["multiple_choice"])
    assert (chosen.score, chosen.groups) == (0.0, None)


def test_rows_outside_a_run_are_those_of_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.jsonl is no file of LongBench.*rows"):
        score(write(tmp_path / "mine.jsonl", [own("A", "A")]))


def test_means_need_all_tasks(tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    for name, task in TASKS.items():
        if task.is_e:
            continue
        answer = {"retrieval": "Paragraph 7", "retrieval_zh": "段落7"}.get(task.metric, "7")
        answer_given = "7" if task.category != "code" else "8"
        write(tmp_path / f"{name}.jsonl", [official(answer_given, answer, all_classes=["7"])])
    averages = means(score_files([tmp_path]))
    assert [round(it.value, 2) for it in averages] == [83.33, 83.33, 87.5]
    (tmp_path / "lcc.jsonl").unlink()
    assert means(score_files([tmp_path])) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("score", float("nan"), "'score' is NaN: Input should be"),
        ("score", 10**400, "'score' is 1000000000.*: Input should be"),
        ("score", True, "'score' is true: Input should be a valid number"),
        ("policy", "a\ud800", r"'policy' is \"a\\ud800\": .*surrogates not allowed"),
        ("budget", None, "'budget' is null: Input should be a valid string"),
        ("length", -1, "'length' is -1: Input should be greater than or equal to 0"),
        ("prediction", None, "'prediction' is null: Input should be an instance of str"),
        ("answers", [], r"'answers' is \[\]: List should have at least 1 item"),
        *((name, ..., f"no column '{name}'") for name in ("task", "prediction", "policy", "id", "metadata")),
    ],
)
def test_wrong_fields_of_rows(tmp_path: Path, field: str, value: Any, message: str) -> None:
    row = own("x", "y", 1) | {field: value}
    row = {name: value for name, value in row.items() if value is not ...}
    path = tmp_path / "rows.0.jsonl"
    path.write_text("\n".join(map(json.dumps, [own("x", "y"), row])) + "\n")
    with pytest.raises(UserError, match=rf"rows.0.jsonl.*2: {message}"):
        score_files([path])


def test_unknown_names_in_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.0.jsonl", [own("x", "y", task="riddle", metric=None)])
    with pytest.raises(UserError, match=r"line 1.*'metric' is null.*--metric with one of qa_f1"):
        score_files([path])
    with pytest.raises(UserError, match=r"1.*'riddle'"):
        score_files([write(path, [own("x", "y", metric="riddle")])])
    for metric in (None, "riddle", "evaluate:exact_match"):
        write(path, [own("x", "x", task="riddle", metric=metric)])
        (entry,) = score_files([path], metrics=["qa_f1"])
        assert (entry.metric, entry.score, entry.differing) == ("qa_f1", 100.0, 0)


def numbered(count: int) -> Rows:
    return [official(f"x{index}", f"x{index}") for index in range(count)]


REFUSED: list[tuple[str, Rows | bytes, str]] = [
    ("qasper", b'{"pred": "x", "answ', r"qasper\.jsonl.*1.*15"),
    ("qasper", b'\n\n["pred"]\n', r"3: \[\"pred\"\] is not a record"),
    ("qasper", b"", r"predictions.*empty"),
    ("qasper", b'{"text": "a", "loss": [], "task": "x"}\n', r"1.*prediction"),
    ("qasper", b"\x1f\x8b\x08", "qasper"),
    ("qasper", [official("x", "y") | {"pred": None}], "1: 'pred'"),
    ("qasper", [official("x", "y") | {"answers": ["x", 3]}], "'answers'"),
    ("qasper", [official("x", "y", all_classes="x")], "'all_classes'"),
    ("qasper", [official("x", "y", length=-1)], "'length'.*-1"),
    ("trec", [official("x", "y")], r"1.*'classification'.*all_classes"),
    ("trec", [official("x", "y", all_classes=[])], r"1.*'classification'.*all_classes"),
    ("passage_retrieval_en", [official("x", "y")], r"1.*'y'.*paragraph"),
    ("qasper_e", [official("x", "y", length=None)], "1 has no length of the record"),
    ("narrativeqa_e", [official("x", "y")], r"tasks.*narrativeqa"),
    ("results", [official("x", "y")], r"tasks.*narrativeqa"),
    # A second run behind the first.
    ("qasper", numbered(3) * 2, r"3.*6.*pred\.py"),
    ("qasper", numbered(9)[:4] + numbered(9), r"4.*13 lines"),
    ("qasper", numbered(60) + numbered(60), r"60.*120 lines"),
    ("qasper", numbered(201), r"201.*200 samples"),
]


@pytest.mark.parametrize(("name", "rows", "message"), REFUSED)
def test_a_file_that_cannot_be_scored(tmp_path: Path, name: str, rows: Rows | bytes, message: str) -> None:
    path = tmp_path / f"{name}.jsonl"
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        write(path, rows)
    with pytest.raises(UserError, match=message):
        score_files([path])


def test_samples_may_be_equal_by_chance(tmp_path: Path) -> None:
    """In a file of `pred.py`, two samples of the same class and length can have the same line."""
    entry = score(write(tmp_path / "qasper.jsonl", numbered(98) + numbered(2)))
    assert (entry.samples, entry.score, entry.repeated) == (100, 100.0, 2)
    with pytest.raises(UserError, match=r"3.*100 lines"):
        score_files([write(tmp_path / "qasper.jsonl", numbered(97) + numbered(3))])


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        score_files([tmp_path / "absent"])
    with pytest.raises(UserError, match=r"holds.*predictions"):
        score_files([tmp_path])


def test_a_published_tree_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One folder per model; a file with two runs and a damaged one beside good ones."""
    tree = tmp_path / "pred_e"
    write(tree / "one" / "qasper.jsonl", numbered(224) * 3)
    write(tree / "one" / "trec.jsonl", [official("7\n1", "7", all_classes=["7", "1"])])
    write(tree / "two" / "qasper.jsonl", [official("x0", "x1"), *numbered(223), *numbered(224)])
    (tree / "two" / "lcc.jsonl").write_text("not JSON\n")
    problems: list[str] = []
    entries = score_files([tree], problems=problems)
    assert [(entry.task, entry.samples) for entry in entries] == [("trec_e", 1)]
    assert len(problems) == 3 and all(
        any(name in problem for problem in problems) for name in ("one/qasper", "two/lcc")
    )
    assert not run_score([tree], keep_first_run=True)
    shown = capsys.readouterr()
    assert "448 lines after the first 224 were left out" in shown.err and "not scored: " in shown.err
    first_run = score_files([tree / "two" / "qasper.jsonl"], keep_first_run=True)[0]
    assert (first_run.samples, first_run.left_out, first_run.groups) == (
        224,
        224,
        {"0-4k": 99.55, "4-8k": None, "8k+": None},
    )


def test_recorded_scores_that_are_others_are_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [own("x", "x", 0, score=1.0), own("x", "x", 1, score=0.5), own("y", "x", 2, score=0.25)]
    path = write(tmp_path / "rows.0.jsonl", rows)
    entry = score(path)
    assert entry.differing == 2 and entry.differs == f"{path}, line 2"
    assert run_score([path])
    assert "2 of 3 rows of qasper have another score" in capsys.readouterr().err


def test_output_is_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "pred_e" / "qasper.jsonl", [*numbered(49), *numbered(1)])
    output = tmp_path / "new" / "scores.json"
    run_score([path], output)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = json.loads(output.read_text("utf-8"), parse_constant=refuse)
    (entry,) = content["scores"]
    assert entry["groups"] == {"0-4k": 100.0, "4-8k": None, "8k+": None}
    assert entry["score"] is None
    shown = capsys.readouterr()
    assert "qasper_e" in shown.out
    assert "100.00" in shown.out
    assert "1 lines are equal to an earlier one; they are counted" in shown.err


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "qasper.jsonl", numbered(1))
    with pytest.raises(UserError, match="choose another --output"):
        run_score([path], path / "below" / "scores.json")


def test_table_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write(tmp_path / name / "qasper.jsonl", numbered(1)) for name in ("[bold]", "b"))
    run_score([one])
    assert "source" not in capsys.readouterr().out
    run_score([one.parent, two])
    assert "source" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows",
    [[official(f"x{index}", "x") for index in range(5)], [own(f"x{index}", "x", index) for index in range(5)]],
    ids=["official", "own"],
)
def test_any_damage_is_an_error_of_the_user(tmp_path: Path, rows: Rows) -> None:
    """Bytes changed and lines cut at random: a score or a message that names the file, nothing else."""
    import random

    rng = random.Random(3)
    path = write(tmp_path / "qasper.jsonl", rows)
    whole = path.read_bytes()
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.choice(b'{}[]",:\n0nte\xff\x00')
        path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        try:
            score_files([path])
        except UserError as error:
            assert "qasper" in str(error)


def v2(index: int, response: str | None, answer: str, judge: bool, **changes: Any) -> dict[str, Any]:
    row = {"_id": f"r{index}", "domain": "x", "sub_domain": "y", "difficulty": "easy", "length": "short"}
    row |= {"question": "?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": answer}
    return row | {"response": response, "pred": answer if judge else None, "judge": judge, "context": "..."} | changes


def test_result_files_of_longbench_v2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        v2(0, "The correct answer is (A).", "A", True),
        v2(1, "**The correct answer is B**", "B", True, difficulty="hard", length="long"),
        v2(2, "I do not know.", "C", False, length="medium"),
        v2(3, None, "D", True, difficulty="hard"),
    ]
    first, second = (write(tmp_path / "results" / f"{name}.jsonl", rows) for name in ("Qwen", "Llama"))
    entry = score(first)
    assert (entry.task, entry.metric, entry.samples, entry.score) == ("longbench_v2", "multiple_choice", 4, 75.0)
    assert (entry.recorded, entry.differing) == (75.0, 0)
    groups = {"overall": 75.0, "easy": 50.0, "hard": 100.0, "short": 100.0, "medium": 0.0, "long": 100.0}
    assert entry.groups == score(second).groups == groups
    assert run_score([tmp_path / "results"])
    shown = capsys.readouterr().out.replace("\n", "")
    assert "Qwen.jsonl" in shown and "Llama.jsonl" in shown
    with pytest.raises(UserError, match=r"repeats.*1"):
        score(write(tmp_path / "twice.jsonl", [rows[0], rows[0]]))
    with pytest.raises(UserError, match="'response' is 3: Input should be an instance of str"):
        score(write(tmp_path / "odd.jsonl", [rows[0] | {"response": 3}]))
