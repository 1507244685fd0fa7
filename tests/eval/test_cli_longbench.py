"""LongBench from tiny files of all tasks, from the command to the report."""

from pathlib import Path

import pytest

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.longbench import PRESETS, TASKS
from hf_paged_eviction_eval.metrics import score_sample
from invoking import run
from longbench_files import longbench_record, write_longbench, write_records
from processes import meta_of, rows_of

ALL21 = PRESETS["all21"]


@pytest.mark.skipif(not (embedded.path() / "config.json").exists(), reason="no embedded model in this checkout")
def test_all_tasks_from_the_command_to_the_report(tmp_path: Path) -> None:
    data, output = write_longbench(tmp_path / "data", per_task=1), tmp_path / "out"
    words = f"eval --tasks all21 --data-dir {data} --policies paged_eviction --budgets 64 --max-length 300"
    # Summaries of 512 tokens would be most of the time.
    command = [*words.split(), "--max-new-tokens", "3", "--output", str(output)]
    result = run(*command, "--workers", "1")
    assert "written to" in result.output
    rows = rows_of(output)
    assert len(rows) == 21
    for row in rows:
        task, record = TASKS[row["task"]], longbench_record(row["task"], int(row["id"][-1]))
        assert row["id"].endswith(record["_id"]) and row["answers"] == record["answers"]
        assert row["metric"] == task.metric and row["record_length"] == record["length"] and row["length"] is None
        assert row["new_tokens"] <= 3 and row["all_classes"] == record["all_classes"]
        text = row["prediction"].lstrip("\n").split("\n")[0] if task.first_line else row["prediction"]
        assert row["score"] == score_sample(task.metric, text, row["answers"], row["all_classes"])
        assert row["chat"] == task.chat
        assert row["budget_tokens"] == 64

    meta = meta_of(output)
    assert set(meta["tasks"]) == set(ALL21)
    truncated = {task: sum(row["truncated"] for row in rows if row["task"] == task) for task in ALL21}
    assert {task: facts["truncated"] for task, facts in meta["tasks"].items()} == truncated
    assert sum(truncated.values()) > 0
    for task, facts in meta["tasks"].items():
        assert facts["chat_template"] == TASKS[task].chat
        assert all(len(digest) == 64 for digest in facts["sha256"].values()) and len(facts["ids_sha256"]) == 64

    scores = run("score", str(output), "--output", str(tmp_path / "scores.json")).output
    assert all(task in scores for task in ALL21)
    run("report", str(output), "--output", str(tmp_path / "report"))
    assert list((tmp_path / "report").glob("report.md"))


def test_data_that_changed_is_asked_again(model_folder: str, tmp_path: Path) -> None:
    """An answer counts by its prompt and by what it is compared with, not by its name."""
    folder = write_longbench(tmp_path / "data", ("trec", "lcc"), per_task=2)
    words = f"eval --model {model_folder} --device cpu --tasks trec,lcc --policies recency --budgets 20%,full"
    command = [*words.split(), "--data-dir", str(folder), "--output", str(tmp_path / "out")]
    run(*command)
    before = rows_of(tmp_path / "out")
    write_records(folder / "lcc.jsonl", [longbench_record("lcc", index) for index in (0, 2)])
    run(*command)
    assert len(before) == 8 and len(rows_of(tmp_path / "out")) == 10
    write_records(folder / "lcc.jsonl", [longbench_record("lcc", index) | {"answers": ["other"]} for index in (0, 2)])
    run(*command)
    assert len(rows_of(tmp_path / "out")) == 14
