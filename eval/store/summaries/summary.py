"""Rows averaged into what tables and plots show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, nan, sqrt
from statistics import fmean
from typing import Any

from ..grouping import grouped
from ..results import Row
from .table import Spread

#: Position bins of a run over texts: enough for a curve, few enough to average over.
BINS = 16

#: Numbers more than means, below which nothing is known of how far a mean may be off: two answers tell nothing.
FEWEST = 2

#: Below a table with marked numbers.
NOTHING_EVICTED = "* nothing was evicted: the budget holds all of it"


@dataclass(frozen=True)
class Cell:
    """Accuracy of one policy at one budget on one task.

    Attributes:
        length: tokens of the prompts; None where every prompt has its own.
        tokens: held per layer and row (the rounded mean, if prompts differ); None for the full cache.
        accuracy: mean score, 0 to 1.
        error: standard error of that mean; 0 for one answer.
        samples: number of questions.
        truncated: how many of their prompts lost their middle.
        all_held: nothing was evicted.
        freedom: numbers more than means, of which `error` is made.
    """

    task: str
    length: int | None
    policy: str
    budget: str
    tokens: int | None
    accuracy: float
    error: float
    samples: int
    truncated: int = 0
    all_held: bool = False
    freedom: int = FEWEST

    @property
    def percent(self) -> Spread:
        """The accuracy in percent."""
        return Spread(100 * self.accuracy, 100 * self.error if self.freedom >= FEWEST else None)


def summarise(rows: Iterable[Row]) -> list[Cell]:
    """One cell per task, length, policy and budget, in the order of first appearance."""
    groups = grouped(rows, lambda row: (row["task"], row["length"], row["policy"], row["budget"]))
    return [_cell(key, group) for key, group in groups.items()]


def _cell(key: tuple[str, int | None, str, str], rows: Sequence[Row]) -> Cell:
    scores = [row["score"] for row in rows]
    tokens = held_tokens(row["budget_tokens"] for row in rows)
    truncated = sum(bool(row.get("truncated")) for row in rows)
    error, count = _error([scores]), len(scores)
    return Cell(*key, tokens, fmean(scores), error, count, truncated, all_held(rows), count - 1)


def all_held(rows: Sequence[Row]) -> bool:
    """Whether a budget was set and nothing was evicted, for answers or in texts; False where there is no row."""
    return bool(rows) and all(row["budget_tokens"] is not None and _all_held(row) for row in rows)


def _all_held(row: Row) -> bool:
    """As far as lengths tell, where nobody counted."""
    if "text" in row:
        return bool(row["tokens"] <= row["budget_tokens"])
    evicted = (row.get("efficiency") or {}).get("evicted_tokens")
    if evicted is None:
        return bool(row["budget_tokens"] >= (row.get("prompt_tokens") or inf) + (row.get("new_tokens") or 0))
    return bool(evicted == 0)


def held_tokens(tokens: Iterable[int | None]) -> int | None:
    """The rounded mean of budgets in tokens; None if there is none."""
    known = [count for count in tokens if count is not None]
    return round(fmean(known)) if known else None


def standard_error(groups: Iterable[Sequence[float]]) -> float | None:
    """Of the mean over groups of their means, which are independent; None where too few numbers tell."""
    found = list(groups)
    return _error(found) if sum(len(values) - 1 for values in found) >= FEWEST else None


def _error(groups: Sequence[Sequence[float]]) -> float:
    return _joint([_of_a_mean(values) if len(values) > 1 else 0.0 for values in groups])


def _of_a_mean(values: Sequence[float]) -> float:
    mean = fmean(values)  # `stdev` counts in fractions, which takes a hundred times as long
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _joint(errors: Sequence[float]) -> float:
    """Of the mean of independent numbers that have these standard errors."""
    return sqrt(sum(error**2 for error in errors)) / len(errors)


def mean_of(values: Iterable[float | None], scale: float = 1.0) -> Spread | None:
    """The mean of what is known, with its standard error; None where nothing is."""
    known = [scale * value for value in values if value is not None]
    return Spread(fmean(known), standard_error([known])) if known else None


def mean_of_means(groups: Iterable[Sequence[float]], scale: float = 1.0) -> Spread:
    """The mean over groups, each counting the same, with its standard error."""
    found = [[scale * value for value in values] for values in groups]
    return Spread(fmean(map(fmean, found)), standard_error(found))


def share_of(tasks: Mapping[Any, Sequence[tuple[float, float]]]) -> tuple[float, float | None, float | None, int]:
    """What share of something is reached, each task counting the same.

    Args:
        tasks: by task, what was reached and what there is, by sample.

    Returns:
        What there is in the mean; the share of it, None where that is not above zero by more than two standard errors;
        the standard error of the share, if it has one; the number of samples.
    """
    count = sum(map(len, tasks.values()))
    gain = fmean(fmean(own for own, _ in pairs) for pairs in tasks.values())
    distance = fmean(fmean(most for _, most in pairs) for pairs in tasks.values())
    noise = standard_error([[most for _, most in pairs] for pairs in tasks.values()]) or 0.0
    if distance <= 2 * noise or distance <= 0:
        return distance, None, None, count
    share = gain / distance
    rest = [[own - share * most for own, most in pairs] for pairs in tasks.values()]
    error = standard_error(rest)
    return distance, share, None if error is None else error / distance, count


def over_tasks(cells: Sequence[Cell]) -> list[Cell]:
    """The mean over tasks, each counting the same; its error assumes independent tasks."""
    groups = grouped(cells, lambda cell: (cell.length, cell.policy, cell.budget))
    return [
        Cell(
            "all tasks",
            *key,
            held_tokens(cell.tokens for cell in group),
            fmean(cell.accuracy for cell in group),
            _joint([cell.error for cell in group]),
            sum(cell.samples for cell in group),
            sum(cell.truncated for cell in group),
            all(cell.all_held for cell in group),
            sum(cell.freedom for cell in group),
        )
        for key, group in groups.items()
    ]


@dataclass(frozen=True)
class Curve:
    """Perplexity of one policy at one budget.

    Attributes:
        tokens: held per layer and row; None for the full cache.
        perplexity: over all tokens of all texts; not a number where a loss is none, infinite where it is too large.
        by_position: per position bin; None where no text reaches.
        predicted: number of predicted tokens.
        all_held: nothing was evicted.
        error: standard error of the perplexity over the texts.
    """

    policy: str
    budget: str
    tokens: int | None
    perplexity: float
    by_position: list[float | None]
    predicted: int
    all_held: bool = False
    error: float | None = None


def curves(rows: Iterable[Row]) -> list[Curve]:
    """One curve per policy and budget, in the order of first appearance."""
    groups = grouped(rows, lambda row: (row["policy"], row["budget"], row["budget_tokens"]))
    return [_curve(key, group) for key, group in groups.items()]


def _curve(key: tuple[str, str, int | None], rows: Sequence[Row]) -> Curve:
    known = ([nan if loss is None else loss for loss in row["loss"]] for row in rows)
    losses = [sum(column) for column in zip(*known, strict=True)]
    counts = [sum(column) for column in zip(*(row["count"] for row in rows), strict=True)]
    bins = [_perplexity(loss, count) if count else None for loss, count in zip(losses, counts, strict=True)]
    whole = _perplexity(sum(losses), sum(counts))
    # A ratio of two sums over texts: its error is that of what each text adds to the mean.
    rest = [sum(nan if loss is None else loss for loss in row["loss"]) - log(whole) * sum(row["count"]) for row in rows]
    error = standard_error([rest]) if isfinite(whole) else None
    error = None if error is None else whole * error * len(rows) / sum(counts)
    return Curve(*key, whole, bins, sum(counts), all_held(rows), error)


def _perplexity(loss: float, count: int) -> float:
    try:
        return exp(loss / count)
    except OverflowError:
        return inf
