"""What a run shows at its end: policies by budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pandas import DataFrame, Series

from ..caches.budgets import FULL
from .means import cells_of, too_hard
from .table import Table

_LINE = ["policy", "budget"]


def accuracy_grids(frame: DataFrame) -> Iterator[list[Table]]:
    """Accuracy in percent of rows over tasks, per length: the mean over tasks, and then every task; of one task, that
    alone. The full cache and the number of questions stand in the title."""
    for length, here in frame.groupby("length", sort=False):
        tasks = [(str(task), mine) for task, mine in here.groupby("task", sort=False)]
        of = tasks[0][0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"
        size = f"{length} tokens, " if length else ""
        first = _grid(f"accuracy in %, {size}{of}", cells_of(here, _LINE, ["task"]), "score", 1)
        # Narrow columns, so that two tables stand side by side.
        rest = [_grid(task, cells_of(mine, _LINE), "score", 1, brief=True) for task, mine in tasks]
        yield [replace(first, note=too_hard(here)), *(rest if len(tasks) > 1 else [])]


def perplexity_grid(curves: DataFrame) -> Table:
    """Perplexity over all tokens; the full cache stands in the title."""
    return _grid("perplexity", curves, "perplexity", 2, lowest=True)


def _grid(title: str, cells: DataFrame, column: str, digits: int, brief: bool = False, lowest: bool = False) -> Table:
    """A table of a column; budgets are followed by their tokens, or each cell by its own, unless it is `brief`."""
    if "samples" in cells:
        title += f", n {' to '.join(dict.fromkeys(map(str, sorted(cells['samples'].unique()))))}"
    full = cells[cells["policy"] == FULL].set_index("policy")[[column]]
    full_scores = [line.cells[0].text for line in Table("", "", full, digits).lines]
    title = ", ".join([title, *(f"full cache {text}" for text in full_scores)])
    rest = cells[cells["policy"] != FULL]
    # One column for each budget. A share or bytes may come to other tokens under other policies.
    alike = rest.groupby("budget", sort=False)["tokens"].nunique(dropna=False) == 1
    tokens = rest.groupby("budget", sort=False)["tokens"].first()
    titles = {name: f"{name} ({tokens[name]})" for name in alike.index if alike[name] and name != str(tokens[name])}
    values = [
        replace(value, tokens=None if brief or alike[budget] else held)
        for value, budget, held in zip(rest[column], rest["budget"], rest["tokens"], strict=True)
    ]
    keys = [rest["policy"], rest["budget"].rename("column")]
    numbers = Series(values, rest.index, dtype=object).groupby(keys, sort=False).first().unstack("column")
    numbers = numbers.reindex(index=rest["policy"].unique(), columns=rest["budget"].unique()).rename_axis("policy")
    numbers = numbers if brief else numbers.rename(columns=titles)
    return Table("grid", title, numbers, digits, best=list(numbers.columns), lowest=lowest)
