"""Plots of a report: what is drawn where, and in which style."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

from hf_paged_eviction_eval.report.figures import (
    agreement_plot,
    efficiency_plot,
    score_over_buckets,
    score_over_length,
)
from hf_paged_eviction_eval.report.runs import Run, load_runs
from hf_paged_eviction_eval.tables.means import Mean
from hf_paged_eviction_eval.tables.plot import accuracy_by_task
from hf_paged_eviction_eval.tables.plot_style import COLOURS, KNOWN, policy_styles
from report_rows import FULL, make_row, make_rows, write_run

RECENT = ("recency", "64")


def run_of(folder: Path, rows: list[dict[str, object]]) -> Run:
    (run,) = load_runs([write_run(folder, rows)])
    return run


def test_known_policies_always_look_the_same() -> None:
    alone = {name: policy_styles([name])[name] for name in KNOWN}
    assert policy_styles([*KNOWN, "another"]) | alone == policy_styles([*KNOWN, "another"])
    assert [alone[name]["color"] for name in KNOWN] == list(COLOURS)


def test_new_policies_never_look_like_others() -> None:
    names = [*KNOWN, *(f"policy {index}" for index in range(21))]
    styles = policy_styles(names)
    looks = {(style["color"], style["marker"], str(style["linestyle"])) for style in styles.values()}
    assert len(looks) == len(names)
    assert policy_styles(["caote(h2o)"]) == policy_styles(["caote(h2o)"])
    assert all(style["linestyle"] != "--" for style in styles.values())  # the full cache's
    assert len(policy_styles(f"policy {index}" for index in range(200))) == 200


def test_decay_over_length(tmp_path: Path) -> None:
    rows = make_rows(["a"], [RECENT, FULL], lengths=[1024, 512], count=1)
    for row in rows:
        row["score"] = 512 / row["length"] if row["policy"] == "recency" else 1.0
    plot = score_over_length(run_of(tmp_path, rows))
    assert plot is not None
    lines = {line.get_label(): line.get_xydata().tolist() for line in plot.figure.axes[0].get_lines()}
    assert lines == {"recency": [[512, 100], [1024, 50]], "full cache": [[512, 100], [1024, 100]]}
    one_length = make_rows(["a"], [RECENT], lengths=[512])
    assert score_over_length(run_of(tmp_path / "one", one_length)) is None


def test_decay_over_buckets_leaves_out_an_empty_one(tmp_path: Path) -> None:
    rows = [
        make_row("qasper_e", RECENT, index, record_length=length, score=0.5) for index, length in enumerate((1, 9000))
    ]
    plot = score_over_buckets(run_of(tmp_path, rows))
    assert plot is not None
    assert plot.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[0, 50], [2, 50]]


def test_panels_only_for_what_was_measured(tmp_path: Path) -> None:
    rows = make_rows(["a"], [RECENT, FULL], lengths=[512])
    for row in rows:
        row["efficiency"] = {"batch_rows": 1, "kv_bytes": 2**20, "peak_bytes": None}
        row["agreement"] = {"identical": 0.5, "kl": None}
    run = run_of(tmp_path, rows)
    plot = efficiency_plot(run, 512)
    assert plot is not None and [axes.get_title() for axes in plot.figure.axes] == ["KV held (MiB per row)"]
    assert plot.figure.axes[0].get_lines()[1].get_xydata().tolist() == [[64, 1.0]]
    drawing = agreement_plot(run)
    assert drawing is not None and [axes.get_title() for axes in drawing.figure.axes] == ["identical tokens (%)"]
    bare = run_of(tmp_path / "bare", make_rows(["a"], efficiency=None, agreement=None))
    assert efficiency_plot(bare, 0) is None and agreement_plot(bare) is None


def axes_of(*cells: dict[str, Any]) -> Any:
    return accuracy_by_task(DataFrame(list(cells))).axes[0]


def cell(policy: str, budget: str, tokens: int | None, score: float, length: int = 0) -> dict[str, Any]:
    return {"task": "task", "length": length, "policy": policy, "budget": budget, "tokens": tokens} | {
        "score": Mean(100 * score)
    }


def test_budgets_stand_at_tokens_or_at_shares() -> None:
    tokens = axes_of(cell("p", "256", 256, 0.1), cell("p", "25%", 900, 0.2), cell(*FULL, None, 0.3))
    line = next(line for line in tokens.get_lines() if line.get_label() == "p")
    assert line.get_xdata().tolist() == [256, 900] and "tokens" in tokens.get_xlabel()
    shares = axes_of(cell("p", "25%", 900, 0.1), cell("p", "50%", 1800, 0.2))
    assert shares.get_lines()[0].get_xdata().tolist() == [25, 50]
    # Below the smallest legal budget more was held than asked for: that counts, where it is one number.
    assert axes_of(cell("p", "1%", 48, 0.1, length=96)).get_lines()[0].get_xdata().tolist() == [50]


def test_ticks_do_not_lie_over_each_other() -> None:
    budgets = [64, 65, 66, 128, 129, 4096]
    ticks = axes_of(*(cell("p", str(budget), budget, 0.5) for budget in budgets)).get_xticks().tolist()
    assert ticks == [64, 128, 4096] and all(after / before > 1.15 for before, after in pairwise(ticks))


def test_scores_begin_at_zero_and_fit() -> None:
    for score, top in ((0.02, 5), (0.31, 40), (0.97, 100), (1.0, 100)):
        low, high = axes_of(cell("p", "64", 64, score)).get_ylim()
        assert low <= 0 and high == pytest.approx(1.03 * top)


def test_styles_come_in_one_order_whatever_the_hash_of_a_name() -> None:
    names = [f"policy_{number}" for number in range(20)]
    assert list(policy_styles(reversed(names))) == sorted(names)
