"""Tasks of the user: records of any format, a template, a metric; a YAML file that says all of it."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asking import asked
from hf_paged_eviction_eval.data.file_task import FileTask
from hf_paged_eviction_eval.data.longbench import TASKS
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.data.task_files import read_task
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.device import model_settings
from hf_paged_eviction_eval.models.loading import load_tokenizer
from hf_paged_eviction_eval.options.evaluate import EvalOptions, TaskFileOptions
from hf_paged_eviction_eval.running.requests import task_settings
from hf_paged_eviction_eval.tasks import available_tasks
from hf_paged_eviction_eval.tasks.suites import load_samples
from invoking import run
from longbench_files import write_longbench, write_longbench_v2
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


def test_lost_in_the_middle(tmp_path: Path) -> None:
    documents = [{"title": f"T{index}", "text": f"Text {index}.", "isgold": index == 2} for index in range(4)]
    record = {"question": "who?", "answers": ["Ada", "A. Lovelace"], "ctxs": documents, "nq_annotated_gold": {}}
    path = write(tmp_path / "nq-open-4_total_documents_gold_at_2.jsonl.gz", [record] * 3)
    (sample,) = samples(read_task(path, NONE), 1)
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
    (sample,) = samples(read_task(path, NONE), None)
    assert (sample.task, sample.context, sample.question, sample.answers) == ("kept", "d", "q", ("g", "7"))
    assert (sample.metric, sample.max_new_tokens, sample.stop_at_newline) == ("rouge", 5, True)
    (tmp_path / "t.txt").write_text("whole: {{ doc }}")
    over = TaskFileOptions(template=f"@{tmp_path / 't.txt'}", max_new_tokens=9)
    (sample,) = samples(read_task(path, over), None)
    assert (sample.context, sample.question, sample.max_new_tokens) == ("whole: d", "", 9)


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
        ("a.yaml", "template: x", "has no `data:`"),
        ("a.yaml", "data: a.yaml\ntemplat: x", "unknown option 'templat'"),
        ("a.yaml", "data: a.yaml\nmetric: nice", "unknown metric 'nice'"),
        ("a.yaml", "data: none.jsonl", r"data.*file"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.csv", "context,question,answer\na,b,c,d\n", r"1.*fields.*3"),
        ("cut.csv", 'context,question,answer\na,b,"c', "not CSV"),
        ("a.yaml", "data: a.yaml\nname: ../a", r"called '../a'"),
        ("a.jsonl", '{"context": null, "question": "q", "answer": "a"}\n', "prints"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        samples(read_task(path, NONE), None)
        task_settings(EvalOptions(task_file=[path]))


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


def test_names_in_errors_stay_as_they_are(tmp_path: Path) -> None:
    output = run("eval", "--task-file", tmp_path / "a:x:b.jsonl", status=2).output
    assert "a:x:b.jsonl" in "".join(output.split())


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl.gz", RECORDS * 20)
    content = path.read_bytes()
    path.write_bytes(content[:12] + bytes([255] * 4) + content[16:])
    with pytest.raises(UserError, match="cannot read"):
        samples(read_task(path, NONE), None)


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


def test_options_that_are_about_a_file_need_one() -> None:
    with pytest.raises(UserError, match="--metric"):
        task_settings(EvalOptions(metric="qa_f1"))


def test_every_suite_comes_to_records_that_are_a_task_file(tmp_path: Path, tokenizer: Any) -> None:
    """What any suite is turned into, written down, is the same questions with the same scores."""
    folder = write_longbench_v2(write_longbench(tmp_path / "data", per_task=2), 2)
    write(folder / "vt.jsonl", [{"index": 1, "input": "a\nQuestion: b", "outputs": ["c"], "answer_prefix": " d:"}])
    write(folder / "math500.jsonl", [{"problem": "1+1?", "answer": "2"}])
    names = (*TASKS, "longbench_v2", "ruler_data_vt", "math500", *available_tasks())
    options = asked(limit=2, data_dir=str(folder))
    turns = load_tokenizer(model_settings(EvalOptions()))
    turns.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    for name in names:
        for reader in (tokenizer, turns):
            expected = load_samples(name, options, reader, 1536)
            path = write(tmp_path / "written.jsonl", [asdict(sample) for sample in expected])
            read = samples(read_task(path, TaskFileOptions()))
            assert [replace(sample, task=name) for sample in read] == expected, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": "c"}, "'answers' is \"c\""),
        ({"max_new_tokens": 0}, "'max_new_tokens' is 0"),
        ({"metric": "nice"}, "'nice'"),
        ({"metric": "classification"}, "has no all_classes"),
        ({"chat": "yes"}, "'chat' is \"yes\", it must be true or false"),
    ],
)
def test_records_that_are_nearly_those_of_a_suite(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record = {"context": "a", "question": "b", "answers": ["c"], "metric": "qa_f1", "max_new_tokens": 8}
    with pytest.raises(UserError, match=message):
        samples(read_task(write(tmp_path / "mine.jsonl", [record | change]), TaskFileOptions()))


def test_options_count_more_than_a_record(tmp_path: Path) -> None:
    record = {"context": "a", "question": "b", "answers": ["c"], "gold": "d", "metric": "qa_f1", "max_new_tokens": 8}
    path = write(tmp_path / "mine.jsonl", [record | {"id": 3, "cue": " e"}])
    (sample,) = samples(read_task(path, TaskFileOptions(metric="rouge", max_new_tokens=9, answers="gold")))
    assert (sample.id, sample.prompt, sample.answers) == ("3", "ab e", ("d",))
    assert (sample.metric, sample.max_new_tokens) == ("rouge", 9)
    (sample,) = samples(read_task(path, TaskFileOptions(template="{{ gold }}|||{{ question }}")))
    assert (sample.id, sample.prompt, sample.answers, sample.max_new_tokens) == ("mine/0", "db", ("c",), 64)
