"""Means of rows, and the tables that a run shows at its end."""

import io
from typing import Any

from rich.console import Console

from hf_paged_eviction_eval.report.frame import long_frame
from hf_paged_eviction_eval.report.means import cells_of
from hf_paged_eviction_eval.report.table import Table
from hf_paged_eviction_eval.report.tables import score_tables
from report_rows import bold, cells, values


def row(task: str, policy: str, budget: str, tokens: int | None, score: float, length: int = 100) -> dict[str, Any]:
    return {"task": task, "length": length, "policy": policy, "budget": budget, "budget_tokens": tokens, "score": score}


ROWS = [
    row("a", "full", "full", None, 1.0),
    row("a", "p", "25%", 25, 1.0),
    row("a", "p", "25%", 25, 0.0),
    row("a", "q", "25%", 25, 0.0),
    row("b", "full", "full", None, 0.5),
    row("b", "p", "25%", 25, 0.5),
    row("b", "q", "25%", 25, 0.75),
]


def scores(rows: list[dict[str, Any]]) -> Table:
    (table,) = score_tables(long_frame(rows))
    return table


def test_every_task_counts_the_same() -> None:
    frame = long_frame(ROWS)
    first = next(cell for cell in cells_of(frame).itertuples() if cell.policy == "p")
    assert (first.score.value, first.samples, first.tokens) == (50, 2, 25)
    mean = cells_of(frame, ["policy"], ["task"])
    assert {cell.policy: cell.score.value for cell in mean.itertuples()} == {"full": 75, "p": 50, "q": 37.5}


def test_tables() -> None:
    table = scores(ROWS)
    assert table.title == "Generated tasks, prompts of 100 tokens: score in %, n 1 to 2"
    assert list(table.frame) == ["tokens", "a", "b", "mean of 2"], "tokens, where budgets are shares or bytes"
    assert values(table) == [
        ("full", "full", None, 100.0, 50.0, 75.0),
        ("25%", "p", 25, 50.0, 50.0, 50.0),
        ("25%", "q", 25, 0.0, 75.0, 37.5),
    ]
    assert cells(table)[1][0] == "25"
    assert bold(table) == {(1, "a"), (2, "b"), (1, "mean of 2")}
    twice = scores([*ROWS, *(row(task, "p", "25%", 25, 0.5) for task in "ab")])
    assert cells(twice)[1][-1] == "50.0 ± 14.4", "as soon as three answers or more tell"
    alone = scores(ROWS[:4])
    assert list(alone.frame) == ["tokens", "a"]
    assert list(scores([one | {"budget": "64"} for one in ROWS[1:4]]).frame) == ["a"]


def test_a_table_says_where_the_full_cache_answers_next_to_nothing() -> None:
    listed = {"hard": (0.05, 0.0, 0.0), "noisy": (0.0, 0.0, 0.6), "easy": (1.0, 0.8, 1.0)}
    rows = [
        {**row(task, policy, budget, tokens, score), "id": str(at)}
        for task, of_task in listed.items()
        for policy, budget, tokens in (("full", "full", None), ("p", "25%", 25))
        for at, score in enumerate(of_task)
    ]
    table = scores(rows)
    assert "The full cache itself scores 1.7 % of hard, 20.0 % of noisy: too near to nothing" in table.caption
    console = Console(file=io.StringIO(), width=200)
    table.show(console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.index("25%") < output.index("too near to nothing")
    assert scores([one for one in rows if one["task"] == "easy"]).caption == ""
