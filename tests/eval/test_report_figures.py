"""Plots of a report: what is drawn where, and in which style."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

import legible
from hf_paged_eviction_eval.report.means import Mean
from hf_paged_eviction_eval.report.plots import COLOURS, pictures, policy_styles, score_panels
from hf_paged_eviction_eval.report.runs import Run, load_runs
from report_rows import FULL, make_rows, write_run

RECENT = ("recency", "64")


def run_of(folder: Path, rows: list[dict[str, object]]) -> Run:
    (run,) = load_runs([write_run(folder, rows)])
    return run


def test_policies_never_look_like_others() -> None:
    names = [f"policy {index}" for index in range(30)]
    styles = policy_styles([*names, FULL[0]])
    assert len({styles[name]["color"] for name in sorted(names)[: len(COLOURS)]}) == len(COLOURS)
    assert len({(styles[name]["color"], styles[name]["marker"]) for name in names}) == len(names)
    assert [name for name, style in styles.items() if style.get("linestyle") == "--"] == [FULL[0]]


def test_lines_that_coincide_can_all_be_seen() -> None:
    """The one below is wider; a line that goes elsewhere is as it was."""
    points = [
        (name, budget, 256 if budget == "25%" else 512, score)
        for name, budget, score in (
            ("recency", "25%", 0.2),
            ("recency", "50%", 0.4),
            ("streaming_llm", "25%", 0.2),
            ("streaming_llm", "50%", 0.4),
            ("keydiff", "25%", 0.2),
            ("keydiff", "50%", 0.9),
        )
    ]
    below, above, apart = axes_of(*(cell(*point) for point in points)).get_lines()
    assert below.get_linewidth() > above.get_linewidth() + 2 and below.get_markersize() > above.get_markersize() + 3
    assert above.get_linewidth() == apart.get_linewidth()


def test_a_mean_over_fewer_tasks_is_not_drawn(tmp_path: Path) -> None:
    rows = make_rows(["a", "b"], [RECENT, FULL, ("keydiff", "64")], lengths=[512])
    rows = [row for row in rows if (row["task"], row["policy"]) != ("b", "keydiff")]
    _, _, figure = next(iter(pictures([run_of(tmp_path, rows)])))
    assert {line.get_label() for line in figure.axes[0].get_lines()} == {"recency", "full cache"}


@pytest.mark.parametrize("lengths", [[512], [512, 1024, 2048, 4096]])
def test_no_text_leaves_its_picture_or_meets_another(tmp_path: Path, lengths: list[int]) -> None:
    """Nor does a line of a legend or a number of an axis, whatever the names are."""
    policies = [f"{name}(window={at})@pyramid" for at in range(3) for name in ("snapkv", "h2o", "keydiff")]
    variants = [FULL, *((policy, budget) for policy in policies for budget in ("64", "96", "1024", "16384"))]
    rows = make_rows(["a_task_with_a_name_of_some_length", "b"], variants, lengths=lengths, count=2)
    for name, _, figure in pictures([run_of(tmp_path, rows)]):
        assert legible.of_figure(figure) == [], name


def axes_of(*cells: dict[str, Any]) -> Any:
    return score_panels(DataFrame(list(cells))).axes[0]


def cell(policy: str, budget: str, tokens: int | None, score: float, length: int = 0) -> dict[str, Any]:
    return {"panel": "task", "length": length, "policy": policy, "budget": budget, "tokens": tokens} | {
        "score": Mean(100 * score)
    }


def test_budgets_stand_at_what_was_held() -> None:
    axes = axes_of(cell("p", "256", 256, 0.1), cell("p", "25%", 900, 0.2), cell(*FULL, None, 0.3))
    line = next(line for line in axes.get_lines() if line.get_label() == "p")
    assert line.get_xdata().tolist() == [256, 900] and "tokens" in axes.figure.get_supxlabel()


def test_ticks_do_not_lie_over_each_other() -> None:
    budgets = [64, 65, 66, 128, 129, 4096]
    ticks = axes_of(*(cell("p", str(budget), budget, 0.5) for budget in budgets)).get_xticks().tolist()
    assert ticks == [64, 128, 4096] and all(after / before > 1.15 for before, after in pairwise(ticks))


def test_scores_begin_at_zero_and_fit() -> None:
    for score, top in ((0.02, 5), (0.31, 31), (1.0, 100)):
        low, high = axes_of(cell("p", "64", 64, score)).get_ylim()
        assert low <= 0 and high == pytest.approx(1.03 * top)


def test_styles_come_in_one_order_whatever_the_hash_of_a_name() -> None:
    names = [f"policy_{number}" for number in range(20)]
    assert policy_styles(reversed(names)) == policy_styles(names)
