"""What a run shows at its end: policies by budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ...caches.budgets import FULL
from .summary import NOTHING_EVICTED, Cell, Curve, over_tasks
from .table import Column, Spread, Table, Value, find_best


def accuracy_grids(cells: Sequence[Cell]) -> list[list[Table]]:
    """Per length: the mean over tasks, and then every task; of one task, that alone."""
    grids = []
    for length in dict.fromkeys(cell.length for cell in cells):
        here = [cell for cell in cells if cell.length == length]
        tasks = list(dict.fromkeys(cell.task for cell in here))
        size = "" if length is None else f"{length} tokens, "
        of = tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"
        shown = here if len(tasks) == 1 else over_tasks(here)
        grids.append([accuracy_grid(f"accuracy in %, {size}{of}", shown)])
        if len(tasks) > 1:
            # Narrow columns, so that two tables stand side by side.
            each = ([cell for cell in here if cell.task == task] for task in tasks)
            grids[-1] += [accuracy_grid(mine[0].task, mine, lambda cell: cell.budget) for mine in each]
    return grids


def accuracy_grid(title: str, cells: Sequence[Cell], name: Callable[[Cell], str] | None = None) -> Table:
    """Accuracy in percent and its standard error; the full cache and the number of questions stand in the title.

    Args:
        name: of a column; the budget as written and in tokens if None.
    """
    name = name or _in_tokens
    counts = dict.fromkeys(str(count) for count in sorted({cell.samples for cell in cells}))
    numbers = {(cell.policy, name(cell)): cell.percent for cell in cells}
    held = {(cell.policy, name(cell)) for cell in cells if cell.all_held}
    return _grid(f"{title}, n {' to '.join(counts)}", numbers, held, 1, max)


def perplexity_grid(found: Sequence[Curve]) -> Table:
    """Perplexity over all tokens; the full cache stands in the title."""
    held = {(curve.policy, _in_tokens(curve)) for curve in found if curve.all_held}
    numbers = {(curve.policy, _in_tokens(curve)): Spread(curve.perplexity, curve.error) for curve in found}
    return _grid("perplexity", numbers, held, 2, min)


def _grid(
    title: str,
    numbers: Mapping[tuple[str, str], float],
    held: Collection[tuple[str, str]],
    digits: int,
    better: Callable[[Iterable[float]], float],
) -> Table:
    full = [("full cache", number) for (policy, _), number in numbers.items() if policy == FULL]
    shown = {key: number for key, number in numbers.items() if key[0] != FULL}
    budgets, policies = (list(dict.fromkeys(key[at] for key in shown)) for at in (1, 0))
    columns = (Column("policy"), *(Column(budget, digits) for budget in budgets))
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (policy, *(shown.get((policy, budget)) for budget in budgets)) for policy in policies
    )
    known = Table("", "", (Column(""), Column("", digits)), tuple(full))
    title = ", ".join([title, *(f"full cache {known.text(at, 1)}" for at in range(len(full)))])
    best = find_best(rows, columns, [0] * len(rows), range(1, len(columns)), better)
    marked = frozenset(
        (row, column)
        for row, policy in enumerate(policies)
        for column, budget in enumerate(budgets, 1)
        if (policy, budget) in held
    )
    return Table("grid", title, columns, rows, NOTHING_EVICTED if marked else "", best=best, head=1, marked=marked)


def _in_tokens(cell: Cell | Curve) -> str:
    """A budget as written and in tokens."""
    return cell.budget if cell.budget == str(cell.tokens) else f"{cell.budget} ({cell.tokens})"
