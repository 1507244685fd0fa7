"""Tasks of the user: records of any format, a template, a metric; a YAML file that says all of it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.data.task_files import TaskFile
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions, TaskFileOptions
from hf_paged_eviction_eval.options.requests import task_settings
from processes import meta_of, rows_of

RECORDS = [{"context": f"The code of maple is {word}.", "question": "Which code?", "answer": word} for word in "abc"]
NONE = TaskFileOptions()


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
        lines = json.dumps(records) if ".jsonl" not in name else "".join(json.dumps(each) + "\n" for each in records)
        path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    return path


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz", "mine.json", "mine.csv", "mine.parquet"])
def test_records_of_every_format_make_the_same_samples(tmp_path: Path, name: str) -> None:
    found = TaskFile.read(write(tmp_path / name, RECORDS), NONE)
    samples = found.samples(2)
    assert (found.name, [sample.id for sample in samples]) == ("mine", ["mine/0", "mine/1"])
    assert samples[1].context == "The code of maple is b."
    assert samples[1].question == "\n\nQuestion: Which code?\nAnswer:" and samples[1].answers == ("b",)
    assert (samples[1].metric, samples[1].max_new_tokens) == ("qa_f1", 64)


def test_lost_in_the_middle(tmp_path: Path) -> None:
    documents = [{"title": f"T{index}", "text": f"Text {index}.", "isgold": index == 2} for index in range(4)]
    record = {"question": "who?", "answers": ["Ada", "A. Lovelace"], "ctxs": documents, "nq_annotated_gold": {}}
    path = write(tmp_path / "nq-open-4_total_documents_gold_at_2.jsonl.gz", [record] * 3)
    (sample,) = TaskFile.read(path, NONE).samples(1)
    assert (
        sample.context.endswith("Document [4] (Title: T3) Text 3.\n") and "Document [1] (Title: T0)" in sample.context
    )
    assert sample.question.endswith("Question: who?\nAnswer:") and sample.answers == ("Ada", "A. Lovelace")
    assert sample.metric == "string_match_part"


def test_a_yaml_file_and_options_over_it(tmp_path: Path) -> None:
    write(tmp_path / "records.jsonl", [{"doc": "d", "ask": "q", "gold": ["g", 7]}])
    content = {
        "name": "kept",
        "data": "records.jsonl",
        "template": "{{ doc }}|||{{ ask }}",
        "metric": "rouge",
        "max_new_tokens": 5,
        "answers": "gold",
        "stop_at_newline": True,
    }
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(content))
    (sample,) = TaskFile.read(path, NONE).samples(None)
    assert (sample.task, sample.context, sample.question, sample.answers) == ("kept", "d", "q", ("g", "7"))
    assert (sample.metric, sample.max_new_tokens, sample.stop_at_newline) == ("rouge", 5, True)
    (tmp_path / "t.txt").write_text("whole: {{ doc }}")
    over = TaskFileOptions(template=f"@{tmp_path / 't.txt'}", max_new_tokens=9)
    (sample,) = TaskFile.read(path, over).samples(None)
    assert (sample.context, sample.question, sample.max_new_tokens) == ("whole: d", "", 9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n", "say how a prompt is made"),
        ("a.jsonl", '{"context": "c", "question": "q"}\n', r"answers.*answer"),
        ("a.jsonl", '{"context": "c", "question": "q", "answers": []}\n', r"text.*list"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.jsonl", "x\n", r"1.*JSON"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"context": "half \\ud83d", "question": "q", "answer": "a"}\n', r"1.*Unicode"),
        ("a.txt", "x", "records are .jsonl"),
        ("a.jsonl.gz", "x", "cannot read"),
        ("a.parquet", "x", "is not Parquet"),
        ("qasper.jsonl", '{"context": "c", "question": "q", "answer": "a"}\n', "'qasper'"),
        ("a.yaml", "template: x", "has no `data:`"),
        ("a.yaml", "data: a.yaml\ntemplat: x", "unknown key 'templat'"),
        ("a.yaml", "data: a.yaml\nmetric: nice", "unknown metric 'nice'"),
        ("a.yaml", "data: a.yaml\nmax_new_tokens: many", "'many'"),
        ("a.yaml", "data: none.jsonl", r"data.*file"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "- a", "has no `data:`"),
        ("a.csv", "context,question,answer\na,b,c,d\n", r"1.*fields.*3"),
        ("a.csv", "context,question,answer,answer\na,b,c,d\n", "two columns 'answer'"),
        ("a.yaml", "data: a.yaml\nname: ../a", r"called '../a'"),
        ("a.yaml", "data: a.yaml\nname: ''", r"cannot.*called"),
        ("a.jsonl", '{"context": null, "question": "q", "answer": "a"}\n', "prints"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        TaskFile.read(path, NONE).samples(None)
        task_settings(EvalOptions(task_file=[path]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing }}", r"1.*'nothing'"),
        ("{% for %}", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "attribute"),
        ("@/no/such/file", "cannot be read"),
        ("{{ context }}|||{{ question }}|||Answer:", "more than once"),
        ("|||", r"template.*empty"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str, message: str) -> None:
    path = write(tmp_path / "mine.jsonl", RECORDS)
    with pytest.raises(UserError, match=message):
        TaskFile.read(path, TaskFileOptions(template=template)).samples(None)


def test_classification_needs_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{**RECORDS[0], "all_classes": ["a", "b"]}, RECORDS[1]])
    task = TaskFile.read(path, TaskFileOptions(metric="classification"))
    assert task.samples(1)[0].all_classes == ("a", "b")
    with pytest.raises(UserError, match=r"2.*all_classes"):
        task.samples(None)


def test_names_in_errors_stay_as_they_are(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["eval", "--task-file", str(tmp_path / "a:x:b.jsonl")])
    assert said.exit_code == 2
    assert "a:x:b.jsonl" in "".join(said.output.split())


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl.gz", RECORDS * 20)
    content = path.read_bytes()
    path.write_bytes(content[:12] + bytes([255] * 4) + content[16:])
    with pytest.raises(UserError, match="cannot read"):
        TaskFile.read(path, NONE).samples(None)


def test_a_field_may_be_called_self(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{**RECORDS[0], "self": "x"}])
    (sample,) = TaskFile.read(path, TaskFileOptions(template="{{ answer }}: {{ question }}")).samples(None)
    assert sample.context == "a: Which code?"


def test_a_run_over_ones_own_records_and_its_file(model_folder: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", RECORDS)
    words = f"eval --model {model_folder} --device cpu --task-file {path} --policies recency --budgets 24,full"
    command = [*words.split(), "--block-size", "4", "--max-new-tokens", "3", "--output", str(tmp_path / "out")]
    for arguments in (command, ["eval", "--config", str(tmp_path / "out" / "run.yaml")]):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 0, (result.output, result.exception)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 6 and {row["task"] for row in rows} == {"mine"} and {row["metric"] for row in rows} == {"qa_f1"}
    assert meta_of(tmp_path / "out")["tasks"]["mine"]["sha256"]["data"]
    assert CliRunner().invoke(app, ["score", str(tmp_path / "out")]).exit_code == 0
    assert CliRunner().invoke(app, ["report", str(tmp_path / "out")]).exit_code == 0
    write(path, RECORDS[::-1])
    changed = CliRunner().invoke(app, command)
    assert changed.exit_code == 0 and len(rows_of(tmp_path / "out")) == 6 + 4, "a record at another place is another"


def test_prompts_that_are_too_long_are_told_before_the_run(model_folder: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [RECORDS[0], RECORDS[1] | {"context": "word " * 3000}])
    words = f"eval --model {model_folder} --device cpu --task-file {path} --budgets full --max-new-tokens 2"
    command = [*words.split(), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    note, bar = result.output.index("note: 1 of 2 prompts of mine are too long"), result.output.index("2/2 answers")
    assert note < bar
    # One that the person lets through: the model knows 2,048 positions.
    result = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "long"), "--max-length", "2500", "--limit", "2"])
    assert "the model was made for 2048" in " ".join(result.output.split())


def test_options_that_are_about_a_file_need_one() -> None:
    with pytest.raises(UserError, match="--metric"):
        task_settings(EvalOptions(metric="qa_f1"))
