"""What a report says first: the headline, the leaderboard, the names of runs, shaded cells."""

from __future__ import annotations

import csv
import io
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.report.figures import overview
from hf_paged_eviction_eval.report.labels import labels
from hf_paged_eviction_eval.report.leaderboard import leaderboard, standings
from hf_paged_eviction_eval.report.pages.headline import headlines
from hf_paged_eviction_eval.report.runs import Run, load_runs, prompts_of
from hf_paged_eviction_eval.tables.formats import to_csv, to_latex, to_markdown
from report_rows import FULL, bold, make_row, values, write_run

#: Two questions of each of two tasks: the mean of full is 75 %, of `near` 72.5 % at 512 and of `far` 30 %.
SCORES: dict[tuple[str, str], list[float]] = {
    FULL: [1.0, 1.0, 0.5, 0.5],
    ("near", "256"): [0.9, 0.9, 0.0, 0.0],
    ("far", "256"): [0.4, 0.4, 0.2, 0.2],
    ("near", "512"): [1.0, 1.0, 0.4, 0.5],
    ("far", "512"): [0.4, 0.4, 0.2, 0.2],
}


def rows_of(scores: dict[tuple[str, str], list[float]], **changes: Any) -> list[dict[str, Any]]:
    return [
        make_row(("qasper", "lcc")[index // 2], variant, index, score=score, **changes)
        for variant, values in scores.items()
        for index, score in enumerate(values)
    ]


def run_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Run:
    (run,) = load_runs([write_run(folder, rows, **settings)])
    return run


def test_every_number_behind_the_leaderboard(tmp_path: Path) -> None:
    run = run_of(tmp_path, rows_of(SCORES))
    standing = standings(run).loc["", "512", "near"]
    assert standing["kept"].value == pytest.approx(100 * 0.725 / 0.75)
    # One task without spread, one of (0.4, 0.5): half of sqrt(0.005 / 2).
    assert standing["mean"].error == pytest.approx(100 * sqrt(0.005 / 2) / 2)
    assert (standing["mean"].value, standing["tokens"], standing["bytes"]) == (pytest.approx(72.5), 512, 2**20)
    full = standings(run).loc["", "full", "full"]
    assert (full["mean"].value, full["kept"], full["tokens"]) == (pytest.approx(75), None, None)


def test_what_has_not_answered_every_task_has_no_mean(tmp_path: Path) -> None:
    rows = [row for row in rows_of(SCORES) if (row["policy"], row["task"]) != ("far", "lcc")]
    run = run_of(tmp_path, rows)
    assert "far" not in standings(run).index.get_level_values("policy")
    assert [row[0] for row in values(leaderboard([run]))] == ["full cache", "near"]
    plot = overview([run])
    assert plot is not None and {line.get_label() for line in plot.figure.axes[0].get_lines()} == {"full cache", "near"}


def test_leaderboard(tmp_path: Path) -> None:
    table = leaderboard([run_of(tmp_path, rows_of(SCORES))])
    assert table is not None
    assert table.columns == ["256 (512.0 KiB)", "512 (1.0 MiB)"]
    assert values(table) == [
        ("full cache", 75.0, 75.0),
        ("near", pytest.approx(45), pytest.approx(72.5)),
        ("far", pytest.approx(30), pytest.approx(30)),
    ]
    assert bold(table) == {(1, name) for name in table.columns} and table.lines[1].cells[1].text == "72.5 ± 2.5"
    assert table.lines[0].cells[0].shade == 1 and table.lines[2].cells[0].shade == pytest.approx(0.4**2, abs=1e-3)
    assert r"72.5 $\pm$ 2.5" in to_latex(table) and "**72.5 ± 2.5**" in to_markdown(table)
    header, _, near, _ = csv.reader(io.StringIO(to_csv(table)))
    assert header[1:3] == ["256 (512.0 KiB)", "256 (512.0 KiB), standard error"]
    assert float(near[3]) == pytest.approx(72.5) and float(near[4]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "near keeps 97 % (± 3) of the full cache's score at a budget of 512 tokens."),
        ({("near", "512"): [0.9, 0.9, 0.0, 0.0]},
         "near keeps 60 % of the full cache's score at a budget of 256 tokens: no policy keeps 95 % of it."),
        ({("far", "512"): [1.0, 1.0, 0.4, 0.5]},
         "near and far (no difference seen between them) keep 97 % (± 3) of the full cache's score at a budget of 512 "
         "tokens."),
        ({("far", "512"): [1.0, 0.8, 0.4, 0.5]},
         "near and far (no difference seen between them) keep 90 to 97 % (± 3) of the full cache's score at a budget "
         "of 512 tokens."),
        ({FULL: []}, "near reaches 72 % (± 2) at a budget of 512 tokens, the highest mean score; no full cache ran "
                     "beside it."),
        ({FULL: [0.0, 0.0, 0.0, 0.4]},
         "The full cache itself scores 10.0 ± 10.0 %: too near to nothing to judge a policy by these questions on this "
         "model. Take easier tasks, more of them (--limit), or another model."),
    ],
)  # fmt: skip
def test_headline(tmp_path: Path, changes: dict[tuple[str, str], list[float]], sentence: str) -> None:
    assert headlines([run_of(tmp_path, rows_of(SCORES | changes))]) == [("", sentence)]


def test_headline_of_texts(tmp_path: Path) -> None:
    common = {"text": "t", "tokens": 64, "length": 64, "block_size": 16, "count": [4, 4]}
    rows = [
        common | {"policy": policy, "budget": budget, "budget_tokens": tokens, "loss": [loss, loss]}
        for policy, budget, tokens, loss in [
            ("full", "full", None, 4.0),
            ("near", "25%", 16, 4.6),
            ("near", "50%", 32, 4.1),
        ]
    ]
    ((_, sentence),) = headlines([run_of(tmp_path, rows)])
    assert sentence == "near reads the texts with 2.5 % more perplexity than the full cache at a budget of 50 %."


def test_several_runs_stand_beside_each_other(tmp_path: Path) -> None:
    rows = rows_of(SCORES)
    folders = [write_run(tmp_path / name, rows, model=f"org/{name}") for name in ("large", "small")]
    runs = load_runs(folders)
    board = leaderboard(runs)
    assert board is not None and board.grouped and [row[0] for row in values(board)] == ["large"] * 3 + ["small"] * 3
    plot = overview(runs)
    assert plot is not None and [axes.get_title().split("\n")[0] for axes in plot.figure.axes] == ["large", "small"]
    assert [label for label, _ in headlines(runs)] == ["large", "small"]


def test_prompts_have_their_real_lengths(tmp_path: Path) -> None:
    rows = [make_row("niah", FULL, index, 512, prompt_tokens=500 + index) for index in range(3)]
    rows += [make_row("a", FULL, 0, 64), make_row("b", FULL, 0, None, prompt_tokens=None)]
    runs = [run_of(tmp_path, rows)]
    assert prompts_of(runs, 512) == "prompts of 500 to 502 tokens (asked for 512)"
    assert prompts_of(runs, 64) == "prompts of 64 tokens"
    assert prompts_of(runs, 0) == "prompts of their own length"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([{"model": "a/b", "dtype": "x"}] * 2, ["", ""]),
        ([{"question_aware": True}, {"question_aware": False}], ["question known", "question unknown"]),
        (
            [{"attn_implementation": None, "model": "m/one"}, {"attn_implementation": "sdpa", "model": "m/two"}],
            ["one", "two"],
        ),
        ([{"attn_implementation": None}, {"attn_implementation": "sdpa"}], ["default attention", "attention sdpa"]),
        (
            [
                {"model": "m/one", "attn_implementation": None, "data_dir": None, "bits": None},
                {"model": "m/two", "attn_implementation": "eager", "data_dir": None, "bits": None},
                {"model": "m/one", "attn_implementation": None, "data_dir": "d", "bits": None},
                {"model": "m/one", "attn_implementation": None, "data_dir": None, "bits": "8"},
            ],
            ["one", "two", "one, data dir d", "one, bits 8"],
        ),
        ([{"model": "a/m"}, {"model": "b/m"}], ["model a/m", "model b/m"]),
        ([{"block_size": 16, "share_prefill": True}, {"block_size": 32, "share_prefill": False}],
         ["block size 16", "block size 32"]),
        ([{"seed": 0}, {"seed": 0, "new": 1}], ["", ""]),
    ],
)  # fmt: skip
def test_runs_are_named_by_what_tells_them_apart(settings: list[dict[str, Any]], names: list[str]) -> None:
    assert labels(settings, frozenset()) == names
