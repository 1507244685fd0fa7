"""A report marks the numbers of budgets at which nothing was evicted."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.report.measures import agreement_table, text_table
from hf_paged_eviction_eval.report.report import run_report
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.report.scores import score_tables
from hf_paged_eviction_eval.tables.table import Table
from report_rows import FULL, make_row, write_run

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


def marks(table: Table | None) -> dict[str, set[str]]:
    """Names of columns by the budget of the marked row; a note tells what marks are, where there are some."""
    assert table is not None
    marked_by_budget: dict[str, set[str]] = {}
    for line in table.lines:
        budget = line.names[table.names.index("budget")]
        marked = {name for name, cell in zip(table.columns, line.cells, strict=True) if cell.text.endswith("*")}
        marked_by_budget |= {budget: marked_by_budget.get(budget, set()) | marked} if marked else {}
    assert (NOTE in table.caption) == bool(marked_by_budget)
    return marked_by_budget


def one(tables: Iterable[Table], name: str) -> Table:
    return next(table for table in tables if table.name == name)


@pytest.mark.parametrize("counted", [False, True])
def test_scores_of_tasks_are_marked_one_by_one(tmp_path: Path, counted: bool) -> None:
    runs = load_runs([write_run(tmp_path, answers({"qasper": 900, "lcc": 3000}, counted))])
    every = {"qasper", "lcc", "mean of 2"}
    assert marks(one(score_tables(runs), "longbench")) == {"1024": {"qasper"}, "4096": every}


def test_what_stands_for_all_tasks_is_marked_where_all_were_held(tmp_path: Path) -> None:
    runs = load_runs([write_run(tmp_path, answers({"qasper": 900, "lcc": 3000}))])
    assert marks(agreement_table(runs)) == {"4096": {"identical tokens (%)", "KL (nats)"}}


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
    runs = load_runs([write_run(tmp_path, rows)])
    columns = {"perplexity", "against the full cache (%)"}
    held = {"1024": columns, **({"256": columns} if tokens == 100 else {})}
    assert marks(text_table(runs)) == held
