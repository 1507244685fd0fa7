"""A report marks the numbers of budgets at which nothing was evicted."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.report.means import curves
from hf_paged_eviction_eval.report.page import run_report
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.report.table import Table
from hf_paged_eviction_eval.report.tables import measure_tables, score_tables, text_table
from report_rows import FULL, cells, make_row, write_run

VARIANTS = (FULL, ("p", "256"), ("p", "1024"), ("p", "4096"))
NOTE = "* nothing was evicted: the budget holds all of it"


def answers(tasks: dict[str, int], counted: bool = False) -> list[dict[str, Any]]:
    """Three answers of each task, whose prompts have so many tokens."""
    return [
        make_row(
            task,
            (policy, budget),
            index,
            prompt_tokens=tokens,
            score=1.0 - index / 3,
            efficiency={"evicted_tokens": 2 * max(tokens - int(budget), 0)} if counted and policy == "p" else None,
        )
        for task, tokens in tasks.items()
        for policy, budget in VARIANTS
        for index in range(3)
    ]


def marks(tables: Iterable[Table], name: str) -> dict[str, set[str]]:
    """Names of columns by the budget of the marked row; a note tells what marks are, where there are some."""
    table = next(table for table in tables if table.name == name)
    marked_by_budget: dict[str, set[str]] = {}
    for (budget, _), texts in zip(table.frame.index, cells(table), strict=True):
        marked = {name for name, text in zip(table.frame, texts, strict=True) if text.endswith("*")}
        marked_by_budget |= {budget: marked_by_budget.get(budget, set()) | marked} if marked else {}
    assert (NOTE in table.caption) == bool(marked_by_budget)
    return marked_by_budget


@pytest.mark.parametrize("counted", [False, True])
def test_scores_of_tasks_are_marked_one_by_one(tmp_path: Path, counted: bool) -> None:
    (run,) = load_runs([write_run(tmp_path, answers({"qasper": 900, "lcc": 3000}, counted))])
    every = {"qasper", "lcc", "mean of 2"}
    assert marks(score_tables(run.frame), "longbench") == {"1024": {"qasper"}, "4096": every}


def test_what_stands_for_all_tasks_is_marked_where_all_were_held(tmp_path: Path) -> None:
    (run,) = load_runs([write_run(tmp_path, answers({"qasper": 900, "lcc": 3000}))])
    assert marks(measure_tables(run.frame), "answers_own") == {"4096": {"identical (%)", "KL (nats)"}}


def test_the_page_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, answers({"qasper": 900}))
    run_report([folder], tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text("utf-8").replace("\\", "")
    assert NOTE in page and "66.67 ± 19.25*" in page
    assert "*" not in (tmp_path / "out" / "tables" / "longbench.csv").read_text("utf-8")


@pytest.mark.parametrize("tokens", [400, 100])
def test_texts(tmp_path: Path, tokens: int) -> None:
    common = {"text": "t", "tokens": tokens, "length": 64, "block_size": 16, "loss": [2.0] * 16, "count": [4] * 16}
    rows = [
        common | {"policy": policy, "budget": budget, "budget_tokens": None if budget == "full" else int(budget)}
        for policy, budget in VARIANTS[:3]
    ]
    (run,) = load_runs([write_run(tmp_path, rows)])
    columns = {"perplexity", "against the full cache (%)"}
    held = {"1024": columns, **({"256": columns} if tokens == 100 else {})}
    assert marks(text_table(curves(run.texts)), "perplexity") == held
