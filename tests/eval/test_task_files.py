"""Tasks of the user: records of any format, a template, a metric."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from asking import asked
from hf_paged_eviction_eval.data.file_task import FileTask
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.data.task_files import read_task
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions, TaskFileOptions
from hf_paged_eviction_eval.running.requests import task_settings
from invoking import run
from processes import meta_of, rows_of

RECORDS = [{"context": f"The code of maple is {word}.", "question": "Which code?", "answer": word} for word in "abc"]
NONE = TaskFileOptions()


def samples(task: FileTask, limit: int | None = None) -> list[Sample]:
    return task.samples(asked(limit=limit))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    name = path.name
    if name.endswith(".csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    elif name.endswith(".parquet"):
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(records).to_parquet(path)
    else:
        lines = (
            json.dumps(records) if ".jsonl" not in name else "".join(json.dumps(record) + "\n" for record in records)
        )
        path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    return path


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz", "mine.json", "mine.csv", "mine.parquet"])
def test_records_of_every_format_make_the_same_samples(tmp_path: Path, name: str) -> None:
    task = read_task(write(tmp_path / name, RECORDS), NONE)
    read = samples(task, 2)
    assert (task.name, [sample.id for sample in read]) == ("mine", ["mine/0", "mine/1"])
    assert read[1].context == "The code of maple is b."
    assert read[1].question == "\n\nQuestion: Which code?\nAnswer:" and read[1].answers == ("b",)
    assert (read[1].metric, read[1].max_new_tokens) == ("qa_f1", 64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n", "say how a prompt is made"),
        ("a.jsonl", '{"context": "c", "question": "q"}\n', r"answers.*answer"),
        ("a.jsonl", '{"context": "c", "question": "q", "answers": []}\n', r"text.*list"),
        ("a.jsonl", "x\n", r"1.*JSON"),
        ("a.jsonl", '{"context": "half \\ud83d", "question": "q", "answer": "a"}\n', r"1.*Unicode"),
        ("a.txt", "x", "records are .jsonl"),
        ("a.jsonl.gz", "x", "cannot read"),
        ("qasper.jsonl", '{"context": "c", "question": "q", "answer": "a"}\n', "'qasper'"),
        ("a.csv", "context,question,answer\na,b,c,d\n", "cannot read"),
        ("cut.csv", 'context,question,answer\na,b,"c', "cannot read"),
        ("a.jsonl", '{"context": null, "question": "q", "answer": "a"}\n', "'context' is undefined"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        samples(read_task(path, NONE), None)
        task_settings(EvalOptions(task_file=[path]))


def test_options_decide_how_a_record_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"doc": "d", "ask": "q", "gold": ["g", 7]}])
    (tmp_path / "t.txt").write_text("whole: {{ doc }}|||{{ ask }}")
    options = TaskFileOptions(template=f"@{tmp_path / 't.txt'}", max_new_tokens=9, metric="contains", answers="gold")
    (sample,) = samples(read_task(path, options), None)
    assert (sample.context, sample.question, sample.answers) == ("whole: d", "q", ("g", "7"))
    assert (sample.metric, sample.max_new_tokens) == ("contains", 9)
    with pytest.raises(UserError, match="unknown metric 'nice'"):
        read_task(path, TaskFileOptions(metric="nice"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing }}", r"1.*'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "attribute"),
        ("@/no/such/file", "cannot be read"),
        ("{{ context }}|||{{ question }}|||Answer:", "more than once"),
        ("|||", r"template.*empty"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str, message: str) -> None:
    path = write(tmp_path / "mine.jsonl", RECORDS)
    with pytest.raises(UserError, match=message):
        samples(read_task(path, TaskFileOptions(template=template)), None)


def test_classification_needs_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{**RECORDS[0], "all_classes": ["a", "b"]}, RECORDS[1]])
    task = read_task(path, TaskFileOptions(metric="classification"))
    assert samples(task, 1)[0].all_classes == ("a", "b")
    with pytest.raises(UserError, match=r"2.*all_classes"):
        samples(task)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl.gz", RECORDS * 20)
    content = path.read_bytes()
    path.write_bytes(content[:12] + bytes([255] * 4) + content[16:])
    with pytest.raises(UserError, match="cannot read"):
        samples(read_task(path, NONE), None)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json", "mine.csv", "mine.parquet"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path: Path, name: str) -> None:
    records = [RECORDS[0] | {"answer": answer} for answer in ("007", "2024-05-01", "NA", "1e3")]
    read = samples(read_task(write(tmp_path / name, records), NONE))
    assert [sample.answers for sample in read] == [("007",), ("2024-05-01",), ("NA",), ("1e3",)]


def test_a_field_may_be_called_self(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{**RECORDS[0], "self": "x"}])
    (sample,) = samples(read_task(path, TaskFileOptions(template="{{ answer }}: {{ question }}")), None)
    assert sample.context == "a: Which code?"


def test_a_run_over_ones_own_records_and_its_file(model_folder: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", RECORDS)
    words = f"eval --model {model_folder} --device cpu --task-file {path} --policies recency --budgets 24,full"
    command = [*words.split(), "--block-size", "4", "--max-new-tokens", "3", "--output", str(tmp_path / "out")]
    run(*command)
    run("eval", "--config", tmp_path / "out" / "run.yaml")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 6 and {row["task"] for row in rows} == {"mine"} and {row["metric"] for row in rows} == {"qa_f1"}
    assert meta_of(tmp_path / "out")["tasks"]["mine"]["sha256"]["data"]
    run("score", tmp_path / "out")
    run("report", tmp_path / "out")
    write(path, RECORDS[::-1])
    run(*command)
    assert len(rows_of(tmp_path / "out")) == 6 + 4, "a record at another place is another"


def test_prompts_that_are_too_long_are_told_before_the_run(model_folder: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [RECORDS[0], RECORDS[1] | {"context": "word " * 3000}])
    words = f"eval --model {model_folder} --device cpu --task-file {path} --budgets full --max-new-tokens 2"
    command = [*words.split(), "--output", str(tmp_path / "out")]
    output = run(*command).output
    note, bar = output.index("note: 1 of 2 prompts of mine are too long"), output.index("2/2 answers")
    assert note < bar
    # One that the person lets through: the model knows 2,048 positions.
    result = run(*command[:-1], tmp_path / "long", "--max-length", 2500, "--limit", 2)
    assert "the model was made for 2048" in " ".join(result.output.split())
