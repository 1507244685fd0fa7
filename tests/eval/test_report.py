"""Means of rows, and the tables and plots that a run shows at its end."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame
from rich.console import Console

from hf_paged_eviction_eval.tables.frame import long_frame
from hf_paged_eviction_eval.tables.grids import accuracy_grids, perplexity_grid
from hf_paged_eviction_eval.tables.means import Mean, cells_of
from hf_paged_eviction_eval.tables.plot import accuracy_by_task, accuracy_panels, mean_cells, perplexity_by_position
from hf_paged_eviction_eval.tables.plot_style import save
from hf_paged_eviction_eval.tables.terminal import show
from report_rows import bold, values


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


def curve(policy: str, tokens: int | None, bins: Iterable[float | None]) -> dict[str, Any]:
    return {"policy": policy, "budget": str(tokens or policy), "tokens": tokens, "perplexity": Mean(3.0)} | {
        "by_position": list(bins)
    }


def test_every_task_counts_the_same() -> None:
    frame = long_frame(ROWS)
    first = next(cell for cell in cells_of(frame).itertuples() if cell.policy == "p")
    assert (first.score.value, first.samples, first.tokens) == (50, 2, 25)
    mean = cells_of(frame, ["policy"], ["task"])
    assert {cell.policy: cell.score.value for cell in mean.itertuples()} == {"full": 75, "p": 50, "q": 37.5}


def test_tables() -> None:
    (grids,) = accuracy_grids(long_frame(ROWS))
    assert [grid.title.partition(",")[0] for grid in grids] == ["accuracy in %", "a", "b"]
    assert grids[0].columns == ["25% (25)"] and grids[1].columns == ["25%"]
    assert values(grids[0]) == [("p", 50.0), ("q", 37.5)] and bold(grids[0]) == {(0, "25% (25)")}
    assert grids[0].title.endswith("mean of 2 tasks, n 2 to 3, full cache 75.0") and "a, n 1 to 2" in grids[1].title
    (twice,) = accuracy_grids(long_frame([*ROWS, *(row(task, "p", "25%", 25, 0.5) for task in "ab")]))
    assert twice[0].lines[0].cells[0].text == "50.0 ± 14.4", "as soon as three answers or more tell"
    apart = [*ROWS, *(row(task, "r", "25%", 32, 0.5) for task in "ab")]
    (grids,) = accuracy_grids(long_frame(apart))
    assert grids[0].columns == ["25%"], "a budget has one column, whatever it comes to"
    assert [line.cells[0].text for line in grids[0].lines] == ["50.0 (25)", "37.5 (25)", "50.0 (32)"]
    ((alone,),) = accuracy_grids(long_frame(ROWS[:4]))
    assert alone.title == "accuracy in %, 100 tokens, a, n 1 to 2, full cache 100.0"
    assert perplexity_grid(DataFrame([curve("p", 64, [3.0] * 16)])).columns == ["64"]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.usefixtures("drawn")
def test_plots_with_one_line_or_many(tmp_path: Path, alone: bool) -> None:
    many = [
        row(task, f"policy {index}", "25%", 25, 0.1 * index, length)
        for task in "abcde"
        for length in (100, 200)
        for index in range(9)
    ]
    frame = long_frame(ROWS[:1] if alone else many)
    save(accuracy_panels(mean_cells(frame)), tmp_path / "mean.png")
    save(accuracy_by_task(cells_of(frame)), tmp_path / "by_task.png")
    save(perplexity_by_position(DataFrame([curve("full", None, [3.0] * 15 + [None])]), 160), tmp_path / "text.png")
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_table_says_where_the_full_cache_answers_next_to_nothing() -> None:
    scores = {"hard": (0.05, 0.0, 0.0), "noisy": (0.0, 0.0, 0.6), "easy": (1.0, 0.8, 1.0)}
    rows = [
        {**row(task, policy, budget, tokens, score), "id": str(at)}
        for task, values in scores.items()
        for policy, budget, tokens in (("full", "full", None), ("p", "25%", 25))
        for at, score in enumerate(values)
    ]
    (grids,) = accuracy_grids(long_frame(rows))
    assert "The full cache itself scores 1.7 % of hard, 20.0 % of noisy: too near to nothing" in grids[0].caption
    console = Console(file=io.StringIO(), width=200)
    show(console, *grids[:1], grids[1:])
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.index("25% (25)") < output.index("too near to nothing")
    ((easy,),) = accuracy_grids(long_frame([one for one in rows if one["task"] == "easy"]))
    assert easy.caption == ""
