"""Tables for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table

from ..budgets import FULL
from .summary import Cell, Curve, over_tasks


@dataclass(frozen=True)
class Grid:
    """Numbers by policy (rows) and budget (columns), as text.

    Attributes:
        title: what the numbers are.
        columns: budgets.
        rows: name of the policy and one text per budget.
        best: row indices of the best number of each column; none where all are equal.
        leads: the tables behind it, up to the next one that leads, are its parts.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    best: tuple[frozenset[int], ...]
    leads: bool = False


def make_grid(
    title: str,
    numbers: dict[tuple[str, str], float],
    show: Callable[[float], str],
    best: Callable[[Sequence[float]], float],
    errors: Mapping[tuple[str, str], float] | None = None,
) -> Grid:
    """Arrange `numbers` by (policy, budget), with their standard errors; the same text is equally good."""
    policies = list(dict.fromkeys(policy for policy, _ in numbers))
    budgets = list(dict.fromkeys(budget for _, budget in numbers))
    texts = {key: show(value) for key, value in numbers.items()}
    whole = {key: text + (f" ± {show(errors[key])}" if errors else "") for key, text in texts.items()}
    rows = tuple((policy, tuple(whole.get((policy, budget), "") for budget in budgets)) for policy in policies)
    winners = []
    for budget in budgets:
        winner = show(best([value for (_, other), value in numbers.items() if other == budget]))
        bold = frozenset(index for index, policy in enumerate(policies) if texts.get((policy, budget)) == winner)
        winners.append(bold if len(bold) < len(rows) else frozenset())
    return Grid(title, tuple(budgets), rows, tuple(winners))


def accuracy_grid(title: str, cells: Sequence[Cell], name: Callable[[Cell], str]) -> Grid:
    """Accuracy in percent and its standard error, in columns of these names; the full cache and the number of questions
    stand in the title."""
    numbers = {(cell.policy, name(cell)): 100 * cell.accuracy for cell in cells if cell.policy != FULL}
    errors = {(cell.policy, name(cell)): 100 * cell.error for cell in cells}
    full = [f"full cache {100 * cell.accuracy:.1f} ± {100 * cell.error:.1f}" for cell in cells if cell.policy == FULL]
    counts = dict.fromkeys(str(count) for count in sorted({cell.samples for cell in cells}))
    return make_grid(", ".join([title, f"n {' to '.join(counts)}", *full]), numbers, "{:.1f}".format, max, errors)


def accuracy_grids(cells: Sequence[Cell]) -> list[Grid]:
    """Per length: the mean over tasks, then every task; of one task, that alone."""
    grids = []
    for length in dict.fromkeys(cell.length for cell in cells):
        here = [cell for cell in cells if cell.length == length]
        tasks = list(dict.fromkeys(cell.task for cell in here))
        size = "" if length is None else f"{length} tokens, "
        of = tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"
        shown = here if len(tasks) == 1 else over_tasks(here)
        grids.append(replace(accuracy_grid(f"accuracy in %, {size}{of}", shown, column_name), leads=True))
        if len(tasks) == 1:
            continue
        for task in tasks:
            # Narrow columns, so that two tables stand side by side.
            mine = [cell for cell in here if cell.task == task]
            grids.append(accuracy_grid(task, mine, lambda cell: cell.budget))
    return grids


def perplexity_grid(found: Sequence[Curve]) -> Grid:
    """Perplexity over all tokens; the full cache stands in the title."""
    numbers = {(curve.policy, column_name(curve)): curve.perplexity for curve in found if curve.policy != FULL}
    full = [f"full cache {curve.perplexity:.2f}" for curve in found if curve.policy == FULL]
    return make_grid(", ".join(["perplexity", *full]), numbers, "{:.2f}".format, min)


def column_name(cell: Cell | Curve) -> str:
    """A budget as written and in tokens."""
    return cell.budget if cell.budget == str(cell.tokens) else f"{cell.budget} ({cell.tokens})"


def for_terminal(grids: Sequence[Grid]) -> RenderableType:
    """Every table that leads, and its parts below it, side by side where they fit; the best of a column in bold."""
    parts: list[RenderableType] = []
    for grid in grids:
        if grid.leads or not parts:
            parts += [_rich(grid), Columns(padding=(0, 2))]
        else:
            cast(Columns, parts[-1]).add_renderable(_rich(grid))
    return Group(*parts)


def _rich(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    table.min_width = len(grid.title) if grid.leads else None  # a narrow table does not break its title
    # In a narrow terminal first the heads are wrapped, then long names; nothing is cut off.
    table.add_column("policy", overflow="fold")
    for name in grid.columns:
        table.add_column(name, justify="right", overflow="fold")
    for index, (policy, cells) in enumerate(grid.rows):
        table.add_row(policy, *marked(grid, index, cells, "[bold]{}[/]"))
    return table


def marked(grid: Grid, row: int, cells: Sequence[str], bold: str) -> list[str]:
    """The cells of a row, the best ones in bold."""
    return [bold.format(text) if row in grid.best[column] else text for column, text in enumerate(cells)]


def for_markdown(grid: Grid) -> str:
    """The table of a grid."""
    rows = [[f"`{policy}`", *marked(grid, index, cells, "**{}**")] for index, (policy, cells) in enumerate(grid.rows)]
    table = markdown_table(["policy", *grid.columns], [False, *(True for _ in grid.columns)], rows)
    return "\n".join([f"*{grid.title}*", "", *table])


def markdown_table(header: Sequence[str], numbers: Sequence[bool], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines.

    Args:
        header, rows: cells as they are written.
        numbers: which columns stand on the right.
    """
    rule = "|" + "".join("---:|" if right else "---|" for right in numbers)
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [first, rule, *rest]
