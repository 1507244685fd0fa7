"""Summaries, tables and the README section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_paged_eviction_eval.store.summaries.formats import to_markdown
from hf_paged_eviction_eval.store.summaries.grids import accuracy_grids, perplexity_grid
from hf_paged_eviction_eval.store.summaries.plot import accuracy_by_task, mean_accuracy, perplexity_by_position
from hf_paged_eviction_eval.store.summaries.plot_style import save
from hf_paged_eviction_eval.store.summaries.summary import Cell, Curve, over_tasks, summarise
from hf_paged_eviction_eval.store.summaries.terminal import to_terminal


def row(task: str, policy: str, budget: str, tokens: int | None, score: float) -> dict[str, Any]:
    return {"task": task, "length": 100, "policy": policy, "budget": budget, "budget_tokens": tokens, "score": score}


ROWS = [
    row("a", "full", "full", None, 1.0),
    row("a", "p", "25%", 25, 1.0),
    row("a", "p", "25%", 25, 0.0),
    row("a", "q", "25%", 25, 0.0),
    row("b", "full", "full", None, 0.5),
    row("b", "p", "25%", 25, 0.5),
    row("b", "q", "25%", 25, 0.75),
]


def test_every_task_counts_the_same() -> None:
    cells = summarise(ROWS)
    first = next(cell for cell in cells if cell.policy == "p")
    assert (first.accuracy, first.samples) == (0.5, 2)
    assert first.error == pytest.approx(0.5)
    mean = {cell.policy: cell.accuracy for cell in over_tasks(cells)}
    assert mean == {"full": 0.75, "p": 0.5, "q": 0.375}


def test_tables() -> None:
    (grids,) = accuracy_grids(summarise(ROWS))
    assert [grid.title.partition(",")[0] for grid in grids] == ["accuracy in %", "a", "b"]
    text = to_markdown(grids[0])
    assert "full cache 75.0**" in text and "| p | **50.0** |" in text and "| q | 37.5 |" in text
    (twice,) = accuracy_grids(summarise([*ROWS, row("a", "p", "25%", 25, 0.5), row("b", "p", "25%", 25, 0.5)]))
    assert "| p | **50.0 ± 14.4** |" in to_markdown(twice[0]), "as soon as three answers or more tell"
    assert "mean of 2 tasks, n 2 to 3" in text and "a, n 1 to 2" in to_markdown(grids[1])
    ((alone,),) = accuracy_grids(summarise(ROWS[:4]))
    assert alone.title == "accuracy in %, 100 tokens, a, n 1 to 2, full cache 100.0"
    assert "| policy | 25% (25) |" in text
    curve = Curve("p", "64", 64, 3.0, [3.0] * 16, 100)
    assert "| policy | 64 |" in to_markdown(perplexity_grid([curve]))


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    name, budgets = "calibrated:embedded@pyramid", [f"{share}%" for share in range(10, 90, 10)]
    cells = [Cell("a", None, name, budget, 1000 + at, 0.125, 0.0, 4) for at, budget in enumerate(budgets)]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(to_terminal(*accuracy_grids(cells)[0]))
    shown = captured.get()
    assert "…" not in shown
    assert name in shown.splitlines() or f"{name} " in shown
    assert shown.count("12.5") == len(budgets) and shown.count("±") == len(budgets)


def test_plots_with_one_line_or_many(tmp_path: Path) -> None:
    many = [
        Cell(task, length, f"policy {index}", "25%", 25, 0.1 * index, 0.0, 4)
        for task in "abcde"
        for length in (100, 200)
        for index in range(9)
    ]
    only_full = [Cell("a", 100, "full", "full", None, 0.5, 0.0, 4)]
    for number, cells in enumerate([many, only_full]):
        save(mean_accuracy(cells), tmp_path / f"{number}.png")
        save(accuracy_by_task(cells), tmp_path / f"{number}_by_task.png")
    curve = Curve("full", "full", None, 3.0, [3.0] * 15 + [None], 9)
    save(perplexity_by_position([curve], 160), tmp_path / "text.png")
    assert len(list(tmp_path.glob("*.png"))) == 5
