"""Tables of a report: their numbers, and what becomes of them as Markdown and CSV."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame, Index, concat

from hf_paged_eviction_eval.data.longbench.tasks import PRESETS
from hf_paged_eviction_eval.report.frame import long_frame
from hf_paged_eviction_eval.report.means import curves
from hf_paged_eviction_eval.report.page import differences_of
from hf_paged_eviction_eval.report.runs import Run, load_runs
from hf_paged_eviction_eval.report.table import Table
from hf_paged_eviction_eval.report.tables import measure_tables, score_tables, text_table
from hf_paged_eviction_eval.running.rows import repeated
from processes import meta_of
from report_rows import FULL, bold, cells, make_row, make_rows, plain, values, write_run

PAGED = ("paged_eviction", "256")


def run_of(folder: Path, rows: list[dict[str, Any]]) -> Run:
    (run,) = load_runs([write_run(folder, rows)])
    return run


def scores_of(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Table]:
    return {table.name: table for table in score_tables(run_of(folder, rows).frame)}


def test_scores_are_rounded_means_and_the_best_of_a_budget_is_marked(tmp_path: Path) -> None:
    scores = {
        FULL: [1.0, 1.0, 1.0],
        ("a", "256"): [1.0, 0.0, 0.0],
        ("b", "256"): [1.0, 1.0, 0.0],
        ("a", "512"): [1.0, 1.0, 1.0],
        ("b", "512"): [1.0, 1.0, 1.0],
    }
    rows = [
        make_row(task, variant, index, score=score / (1 + at))
        for at, task in enumerate(("qasper", "lcc"))
        for variant, values in scores.items()
        for index, score in enumerate(values)
    ]
    table = scores_of(tmp_path, rows)["longbench"]
    assert table.frame.index.names == ["budget", "policy"] and list(table.frame) == ["qasper", "lcc", "mean of 2"]
    assert values(table) == [
        ("full", "full", 100.0, 50.0, 75.0),
        ("256", "a", 33.33, 16.67, 25.0),
        ("256", "b", 66.67, 33.33, 50.0),
        ("512", "a", 100.0, 50.0, 75.0),
        ("512", "b", 100.0, 50.0, 75.0),
    ]
    assert bold(table) == {(2, name) for name in table.frame}  # nothing where all are equal, and never the full cache
    # Answers that are right or wrong have Wilson's interval. Standard error of (.5, 0, 0): sqrt(1/6 / 2 / 3) = 0.167.
    assert cells(table)[1] == ["33.33 [6, 79]", "16.67 ± 16.67", "25.00 ± 18.63"]


def test_generated_tasks_have_a_table_per_length(tmp_path: Path) -> None:
    tables = scores_of(tmp_path, make_rows(["niah", "passkey"], lengths=[2048, 512]))
    assert list(tables) == ["scores_512", "scores_2048"]
    assert list(tables["scores_512"].frame) == ["niah", "passkey", "mean of 2"]
    assert tables["scores_512"].title.startswith("Generated tasks, prompts of")


def test_tasks_of_files_are_not_called_generated(tmp_path: Path) -> None:
    (table,) = scores_of(tmp_path, [make_row("mine", PAGED, 0, length=None)]).values()
    assert table.name == "scores_own" and table.title.startswith("Tasks, prompts of")


def test_buckets_of_longbench_e(tmp_path: Path) -> None:
    rows = [
        make_row("qasper_e", FULL, index, record_length=length, score=score)
        for index, (length, score) in enumerate([(3999, 1.0), (4000, 0.5), (7999, 0.25), (100, 0.0)])
    ]
    tables = scores_of(tmp_path, rows)
    assert values(tables["longbench_e_1"]) == [("full", "full", 50.0)]
    assert values(tables["longbench_e_2"]) == [("full", "full", 37.5)]
    assert "longbench_e_3" not in tables  # nothing in it


def test_aggregates_appear_when_complete_and_say_what_is_missing(tmp_path: Path) -> None:
    rows = make_rows(PRESETS["en16"], [FULL], count=1, score=0.5)
    table = scores_of(tmp_path / "a", rows)["aggregates"]
    assert values(table) == [("full", "full", None, 50.0, 50.0)]
    assert "21 tasks: no number without multifieldqa_zh, dureader, vcsum, lsht, passage_retrieval_zh." in table.note
    assert "aggregates" not in scores_of(tmp_path / "b", make_rows(["qasper"], [FULL]))


def test_longbench_v2_by_group(tmp_path: Path) -> None:
    rows = [
        make_row("longbench_v2", FULL, index, score=score, metadata={"difficulty": difficulty, "length": length})
        for index, (difficulty, length, score) in enumerate([("easy", "short", 1.0), ("hard", "long", 0.0)])
    ]
    table = scores_of(tmp_path, rows)["longbench_v2"]
    assert values(table) == [("full", "full", 50.0, 100.0, 0.0, 100.0, None, 0.0)]


def costs_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    common = {"task": "t", "length": None, "policy": "p", "budget": "b", "budget_tokens": 9, "score": 1.0}
    (table,) = measure_tables(long_frame([common | row for row in rows])) or [None]
    return {name: plain(value) for name, (value,) in table.frame.items()}


def test_costs_of_batches_are_counted_once() -> None:
    batch = {"prefill_seconds": 2.0, "batch_rows": 2, "decode_seconds": 4.0, "decode_steps": 8}
    other = {"prefill_seconds": 2.0, "batch_rows": 1, "decode_seconds": 1.0, "decode_steps": 2}
    rows = [
        {"new_tokens": 9, "efficiency": batch | {"kv_bytes": 10, "evicted_tokens": 4, "peak_bytes": 7}},
        {"new_tokens": 5, "efficiency": batch | {"kv_bytes": 10, "evicted_tokens": 2, "peak_bytes": None}},
        {"new_tokens": 3, "efficiency": other | {"kv_bytes": 40, "evicted_tokens": 0, "peak_bytes": 9}},
        {"new_tokens": 9, "efficiency": None},
    ]
    cost = costs_of(rows)
    assert cost["time per token (ms)"] == pytest.approx(1000 * 5.0 / 10)
    named = ["prefill (s)", "peak memory (MiB)", "KV held (MiB per row)", "evicted tokens"]
    assert [cost[name] for name in named] == [2.0, 9 / 2**20, 20 / 2**20, 2]


def test_costs_of_answers_of_one_token() -> None:
    nothing = {"prefill_seconds": 1.0, "batch_rows": 1, "decode_seconds": 0.0, "decode_steps": 0}
    cost = costs_of([{"new_tokens": 1, "efficiency": nothing}])
    assert "time per token (ms)" not in cost


def test_agreement_leaves_out_what_was_not_compared(tmp_path: Path) -> None:
    rows = [
        make_row("qasper", PAGED, 0, agreement={"identical": 1.0, "kl": 0.5}),
        make_row("qasper", PAGED, 1, agreement={"identical": 0.5, "kl": None}),
        make_row("qasper", PAGED, 2, agreement=None),
        make_row("qasper", FULL, 2),
    ]
    assert measured(tmp_path, rows, ("identical (%)", "KL (nats)")) == {FULL: (None, None), PAGED: (75.0, 0.5)}


def test_answers_that_end_and_repeat(tmp_path: Path) -> None:
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4, 1]) == pytest.approx(2 / 6) and repeated([1, 2, 3]) == 0
    rows = [
        make_row("qasper", PAGED, 0, new_tokens=4, ended=True, repeated=0.0),
        make_row("qasper", PAGED, 1, new_tokens=9, ended=False, repeated=0.5),
        make_row("qasper", PAGED, 2, ended=None, repeated=None),
    ]
    assert measured(tmp_path, rows, ("tokens", "ended (%)", "repeated (%)")) == {PAGED: (6.5, 50.0, 25.0)}


def measured(folder: Path, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[Any, tuple[Any, ...]]:
    (table,) = measure_tables(run_of(folder, rows).frame)
    lines = table.frame[list(columns)].iterrows()
    return {(policy, budget): tuple(map(plain, line)) for (budget, policy), line in lines}


def test_what_the_run_wrote_about_itself_is_repeated(tmp_path: Path) -> None:
    folder = write_run(tmp_path, make_rows(["qasper"], [FULL]))
    meta = meta_of(folder)
    meta |= {"rows": {"finished": 3, "wanted": 40}, "failures": [{"reason": "out of memory", "rows": 2}]}
    (folder / "run.0.json").write_text(json.dumps(meta))
    counted, failed, cut = load_runs([folder])[0].notes
    assert "12 of 40 rows are there" in counted and failed == "2 rows failed: out of memory"
    assert cut.startswith("prompts that were too long and lost their middle: qasper 4 of 12")


def test_runs_stand_beside_each_other_with_what_they_differ_in(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, [make_row("qasper", PAGED, 0, score=score)], dtype=dtype)
        for name, score, dtype in (("a", 0.5, "float32"), ("b", 1.0, "bfloat16"))
    ]
    runs = load_runs(folders)
    (table,) = score_tables(concat([run.frame for run in runs]))
    assert values(table) == [("a", "256", "paged_eviction", 50.0), ("b", "256", "paged_eviction", 100.0)]
    (facts,) = differences_of(runs)
    assert values(facts) == [("settings.dtype", "float32", "bfloat16")]
    assert not list(differences_of(load_runs(folders[:1])))
    assert not list(differences_of(load_runs([folders[0], write_run(tmp_path / "c", [make_row("qasper", PAGED, 1)])])))


def test_perplexities(tmp_path: Path) -> None:
    common = {"tokens": 9, "length": 64, "block_size": 16, "text": "t"}
    rows = [
        common | {"policy": "full", "budget": "full", "budget_tokens": None, "loss": [0.0, 0.0], "count": [4, 4]},
        common | {"policy": "p", "budget": "50%", "budget_tokens": 32, "loss": [0.0, 0.0], "count": [4, 4]},
        common | {"policy": "q", "budget": "50%", "budget_tokens": 32, "loss": [8.0, 0.0], "count": [4, 4]},
    ]
    (table,) = text_table(curves(run_of(tmp_path, rows).texts))
    first, _, last = values(table)
    assert first == ("full", "full", None, 1.0, None, 8)
    assert last == ("50%", "q", 32, pytest.approx(2.71828, abs=1e-4), pytest.approx(171.8, abs=0.1), 8)
    assert bold(table) == {(1, "perplexity")}  # the lowest


AWKWARD = Table(
    "awkward",
    "a_b & 100 %",
    DataFrame(
        {"n": [3, None, 0], "value": [1.23456789, None, -0.5]},
        Index(['a,b"c', "<i>\\{}$#^~_", "line\nbreak"], name="name|x"),
        dtype=object,
    ),
    best=["value"],
)


def test_csv_reads_back_equal(tmp_path: Path) -> None:
    header, *rows = csv.reader(io.StringIO(AWKWARD.csv()))
    assert header == ["name|x", "n", "value"]
    read = [(name, int(n) if n else None, float(value) if value else None) for name, n, value in rows]
    assert read == values(AWKWARD)
    frame = run_of(tmp_path, make_rows(["qasper", "trec"]) + make_rows(["niah"], lengths=[512])).frame
    for table in [*score_tables(frame), *measure_tables(frame)]:
        header, *rows = csv.reader(io.StringIO(table.csv()))
        for row, original in zip(rows, values(table), strict=True):
            shown = [cell for name, cell in zip(header, row, strict=True) if not name.endswith("standard error")]
            for cell, value in zip(shown, original, strict=True):
                assert (cell == "") if value is None else type(value)(cell) == value


def test_markdown_keeps_its_columns() -> None:
    lines = AWKWARD.markdown().splitlines()
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}
    assert bars == {4} and len(lines) == 7
    assert "**1.23**" in lines[4] and "&lt;i&gt;" in lines[5] and "---: |" in lines[3]
