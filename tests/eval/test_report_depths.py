"""Tables of a report by the depth of needles."""

from __future__ import annotations

from pathlib import Path

from hf_paged_eviction_eval.report.depths import depth_bins, depth_table
from hf_paged_eviction_eval.report.runs import Run, load_runs
from report_rows import FULL, make_row, make_rows, write_run

RECENT, KEYDIFF = ("recency", "64"), ("keydiff", "64")


def runs_of(folder: Path, rows: list[dict[str, object]]) -> list[Run]:
    return load_runs([write_run(folder, rows)])


def test_depth_bins() -> None:
    names, name_of = depth_bins([0.0, 0.5, 1.0, 0.5])
    assert names == ["0", "50", "100"] and [name_of(depth) for depth in (0.0, 0.5, 1.0)] == names
    assert len(depth_bins([index / 10 for index in range(11)])[0]) == 11
    assert depth_bins([0.0215, 0.7772])[0][0] == "0-10"
    names, name_of = depth_bins([index / 100 for index in range(101)])
    assert names[0] == "0-10" and names[-1] == "90-100" and len(names) == 10
    assert [name_of(depth) for depth in (0.0, 0.0999, 0.1, 0.95, 1.0)] == ["0-10", "0-10", "10-20", "90-100", "90-100"]


def test_a_cell_is_the_mean_of_its_depth(tmp_path: Path) -> None:
    rows = [
        make_row("niah", RECENT, index, 512, score=score, metadata={"depth": depth})
        for index, (depth, score) in enumerate([(0.0, 1.0), (0.0, 0.5), (1.0, 0.25)])
    ]
    rows.append(make_row("niah", RECENT, 0, 1024, score=0.125, metadata={"depth": 1.0}))
    rows.append(make_row("niah", RECENT, 9, 512, metadata={"depth": None}))
    table = depth_table(runs_of(tmp_path, rows))
    assert table is not None and (table.names, table.columns) == (["length", "budget", "policy"], ["0", "100"])
    shown = [(line.names, [cell.text for cell in line.cells]) for line in table.lines]
    assert shown == [(("512", "64", "recency"), ["75", "25"]), (("1024", "64", "recency"), ["", "12"])]


def test_only_questions_about_a_place_count(tmp_path: Path) -> None:
    rows = [make_row("a", FULL, 0, metadata={"depth": 0.5}), make_row("b", FULL, 0, metadata={"depth": [1, 2]})]
    rows += [make_row("c", FULL, 0, metadata={"depth": 50}), make_row("d", FULL, 0, metadata={})]
    table = depth_table(runs_of(tmp_path / "some", rows))
    assert table is not None and len(table.lines) == 1 and table.title.startswith("a: ")
    assert depth_table(runs_of(tmp_path / "none", rows[1:])) is None


def test_every_task_counts_the_same_and_none_may_lack(tmp_path: Path) -> None:
    rows = make_rows(["a", "b"], [FULL, RECENT, KEYDIFF], lengths=[512], count=1)
    rows += make_rows(["a"], [RECENT], lengths=[512], count=3)[1:]
    for row in rows:
        row |= {"metadata": {"depth": 0.5}, "score": 1.0 if row["task"] == "a" else 0.5}
    rows = [row for row in rows if (row["task"], row["policy"]) != ("b", "keydiff")]
    table = depth_table(runs_of(tmp_path, rows))
    assert table is not None
    shown = [(line.names, [cell.text for cell in line.cells]) for line in table.lines]
    assert shown == [(("512", "full", "full"), ["75"]), (("512", "64", "recency"), ["75"])]
    assert {cell.shade for line in table.lines for cell in line.cells} == {1.0}
