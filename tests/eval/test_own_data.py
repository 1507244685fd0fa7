"""Own data, further: metrics of `evaluate`, datasets, tasks of plugins, files that only look like LongBench."""

import json
from pathlib import Path
from typing import Any

import pytest

from asking import asked
from hf_paged_eviction_eval.data import sources
from hf_paged_eviction_eval.data.longbench.tasks import TASKS
from hf_paged_eviction_eval.data.task_files import read_task
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.metrics.library import check_library_metric, library_score
from hf_paged_eviction_eval.options.evaluate import EvalOptions, TaskFileOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.running.requests import task_settings
from hf_paged_eviction_eval.tasks.suites import PUBLISHED, data_notes
from invoking import run
from longbench_files import longbench_record, write_records
from processes import meta_of, rows_of

RECORDS = [{"context": f"The code of maple is {word}.", "question": "Which code?", "answer": word} for word in "abc"]
METRIC = """
import datasets
import evaluate


class Mine(evaluate.Metric):
    def _info(self):
        kinds = {{"predictions": {kind}, "references": {reference}}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kinds))

    def _compute(self, predictions, references):
        return {result}
"""
TEXT = 'datasets.Value("string")'
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "longbench"


def metric_at(folder: Path, result: str, kind: str = TEXT, reference: str = TEXT) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(METRIC.format(result=result, kind=kind, reference=reference))
    return f"evaluate:{folder}"


@pytest.fixture(autouse=True)
def own_cache() -> None:
    sources.dataset_rows.cache_clear()


def test_metrics_of_the_evaluate_library(tmp_path: Path) -> None:
    first = metric_at(tmp_path / "starts", '{"starts": float(predictions[0].startswith(references[0]))}')
    assert library_score(first, "maple tree", ["oak", "maple"]) == 1 and library_score(first, "maple", ["oak"]) == 0
    every = metric_at(
        tmp_path / "found", '{"found": sum(each in predictions[0] for each in references[0]) / len(references[0])}',
        reference=f"datasets.Sequence({TEXT})",
    )  # fmt: skip
    assert library_score(every, "oak and ash", ["oak", "elm"]) == 0.5
    number = metric_at(
        tmp_path / "same", '{"same": float(predictions == references)}', 'datasets.Value("int32")',
        'datasets.Value("int32")',
    )  # fmt: skip
    assert library_score(number, "7", ["7"]) == 1
    two = metric_at(tmp_path / "several", '{"p": 0.25, "r": 0.75}')
    assert library_score(f"{two}#r", "a", ["b"]) == 0.75
    with pytest.raises(UserError, match=r"returns.*which"):
        library_score(two, "a", ["b"])
    with pytest.raises(UserError, match=r"38.*much.*0"):
        library_score(metric_at(tmp_path / "much", '{"much": 38.0}'), "a", ["b"])
    with pytest.raises(UserError, match="fails: ZeroDivisionError"):
        library_score(metric_at(tmp_path / "zero", '{"zero": 1 / 0}'), "a", ["b"])


def test_a_metric_of_the_hub_is_code_that_nobody_asked_for() -> None:
    with pytest.raises(UserError, match="--trust-remote-code"):
        check_library_metric("evaluate:rouge", trusted=False)


def test_a_run_with_a_metric_of_ones_own(tmp_path: Path, model_folder: str) -> None:
    metric = metric_at(tmp_path / "length", '{"length": min(len(predictions[0]), 2) / 2}')
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    words = f"eval --model {model_folder} --device cpu --task-file {path} --budgets full --max-new-tokens 3"
    command = [*words.split(), "--metric", metric, "--output", str(tmp_path / "out")]
    run(*command)
    rows = rows_of(tmp_path / "out")
    assert {row["metric"] for row in rows} == {metric}
    assert [row["score"] for row in rows] == [min(len(row["prediction"]), 2) / 2 for row in rows]
    # Rows may come from anyone: what they name is not run.
    assert "cannot be computed here" in " ".join(run("score", tmp_path / "out", status=2).output.split())


def test_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "mine"
    folder.mkdir(parents=True)
    for split, records in (("train", RECORDS[:1]), ("test", RECORDS)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = read_task(Path(f"datasets:{folder}"), TaskFileOptions())
    assert task.name == "mine" and len(task.samples(asked())) == 3
    assert len(task.digests(asked())["data"]) == 64
    assert len(read_task(Path(f"datasets:{folder}::train"), TaskFileOptions()).samples(asked())) == 1
    with pytest.raises(UserError, match="'dev'"):
        read_task(Path(f"datasets:{folder}::dev"), TaskFileOptions()).samples(asked())
    (folder / "test.jsonl").unlink()
    sources.dataset_rows.cache_clear()
    assert len(read_task(Path(f"datasets:{folder}"), TaskFileOptions()).samples(asked())) == 1  # the only split
    with pytest.raises(UserError, match=r"'test'.*train"):
        read_task(Path(f"datasets:{folder}::test"), TaskFileOptions()).samples(asked())
    (folder / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    sources.dataset_rows.cache_clear()
    with pytest.raises(UserError, match="write ID"):
        read_task(Path("datasets:a:b:c:d"), TaskFileOptions()).samples(asked())
    settings = task_settings(EvalOptions(task_file=[Path(f"datasets:{folder}")]))
    assert settings.tasks == ("mine",) and settings.task_file == (f"datasets:{folder}",)


def note(task: str, settings: TaskSettings) -> str | None:
    return PUBLISHED[task].note(settings)


def longbench(folder: Path, task: str, count: int, **changes: Any) -> TaskSettings:
    folder.mkdir()
    write_records(folder / f"{task}.jsonl", [longbench_record(task, index) | changes for index in range(count)])
    return asked(task, data_dir=str(folder))


def test_a_file_that_only_looks_like_longbench_is_noticed(tmp_path: Path) -> None:
    few = longbench(tmp_path / "few", "qasper", 3)
    assert note("qasper", few) == ("qasper: 3 records, the official file has 200: not a score of LongBench's qasper")
    assert data_notes(("passkey", "qasper"), few).keys() == {"qasper"}
    assert note("qasper", longbench(tmp_path / "all", "qasper", 200)) is None
    changed = longbench(tmp_path / "changed", "multi_news", 200)
    assert note("multi_news", changed) == (
        "multi_news: as many records as the official file, and others: not a score of LongBench's multi_news"
    )
    with pytest.raises(UserError, match="'hotpotqa'"):
        note("qasper", longbench(tmp_path / "wrong", "qasper", 200, dataset="hotpotqa"))


@pytest.mark.skipif(not SHARED.exists(), reason="the official files are not here")
@pytest.mark.parametrize("task", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_the_official_files_are_known(task: str) -> None:
    settings = asked(task, data_dir=str(SHARED))
    assert TASKS[task].samples == 200 and note(task, settings) is None


def test_the_report_repeats_what_was_noticed(tmp_path: Path) -> None:
    from report_rows import make_rows, write_run

    folder = write_run(tmp_path, make_rows(["qasper"]))
    meta = meta_of(folder)
    (folder / "run.0.json").write_text(json.dumps(meta | {"data_notes": {"qasper": "qasper: 3 records"}}))
    assert "qasper: 3 records" in load_runs([folder])[0].notes
