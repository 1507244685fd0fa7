"""Means with their standard errors, over groups of a long DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, nan, sqrt
from statistics import stdev
from typing import Any

from pandas import DataFrame, Series

from ..caches.budgets import FULL
from ..grouping import grouped
from ..store.results import Row
from .frame import nothing_evicted, whole

#: Numbers more than means, below which nothing is known of how far a mean may be off: two answers tell nothing.
FEWEST = 2
#: A full cache that is right this seldom, in percent, is no measure of other caches.
LEAST = 5.0
#: What tells the cells of a run over tasks apart.
CELL = ("task", "length", "policy", "budget")


@dataclass(frozen=True)
class Mean:
    """A mean that knows how far it may be off.

    Attributes:
        error: its standard error; None where too few numbers tell.
        held: a budget was set, and nothing was evicted in any of the answers.
        interval: where the mean in percent of answers that are right or wrong lies with a probability of 95 % (Wilson);
            None of other numbers, and where too few tell.
        tokens: held per layer and row, where a table has to say it in each cell.
    """

    value: float
    error: float | None = None
    held: bool = False
    interval: tuple[float, float] | None = None
    tokens: int | None = None

    def __float__(self) -> float:
        return self.value


def means(frame: DataFrame, by: Sequence[str], column: str, scale: float = 1.0, within: Sequence[str] = ()) -> Series:
    """The mean of what is known of a column, per group.

    Args:
        by: columns that tell groups apart; the index of the result.
        within: columns that divide a group into parts: the mean of the means of its parts, which are independent.

    Returns:
        A `Mean` per group, in the order of appearance.
    """
    present = frame[frame[column].notna()]
    present = present.assign(value=scale * present[column])
    groups = present.groupby([*by, *within], sort=False)["value"]
    count = groups.size()
    all_alike = scale == 100 and present["value"].isin((0, scale))
    yes_or_no = present.assign(alike=all_alike).groupby(list(by), sort=False)["alike"].all()
    inner = DataFrame(
        {
            "value": groups.mean(),
            "noise": (groups.var() / count).where(count > 1, 0.0),
            "samples": count,
            "inverse": 1 / count,
        }
    )
    cells = inner.groupby(list(by), sort=False)
    outer = cells[["noise", "samples", "inverse"]].sum().assign(value=cells["value"].mean(), groups=cells.size())
    outer["yes_or_no"] = yes_or_no
    outer["held"] = present.groupby(list(by), sort=False)["held"].all() if "held" in present else False
    values = []
    for one in outer.itertuples():
        tells = one.samples - one.groups >= FEWEST
        # Of parts that count the same: as many answers as leave a mean of all of them as uncertain.
        interval = wilson(one.value / scale, one.groups**2 / one.inverse) if tells and one.yes_or_no else None
        error = float(sqrt(one.noise) / one.groups) if tells else None
        values.append(Mean(float(one.value), error, bool(one.held), interval))
    return Series(values, outer.index, dtype=object)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Where a share of `count` answers lies with a probability of 95 %, in percent (Wilson 1927). Unlike a standard
    error it does not say of 8 right answers of 8 that the next one must be right."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def too_hard(frame: DataFrame) -> str:
    """A sentence on the tasks of which the full cache's score is too near to nothing; empty if there is none."""
    scores = means(frame[frame["policy"] == FULL], ["task"], "score", 100)
    hard = [f"{mean.value:.1f} % of {task}" for task, mean in scores.items() if mean.value <= _least(mean)]
    if not hard:
        return ""
    return (
        f"The full cache itself scores {', '.join(hard)}: too near to nothing to judge a policy by. Take easier "
        "questions, more of them, or another model."
    )


def _least(full: Mean) -> float:
    """What a score of the full cache has to exceed, in percent."""
    return max(2 * (full.error or 0.0), LEAST)


def cells_of(frame: DataFrame, by: Sequence[str] = CELL, within: Sequence[str] = ()) -> DataFrame:
    """Per group: the score in percent, `samples`, tokens held per layer and row (the rounded mean; None for the full
    cache), and how many prompts lost their middle. Arguments as of `means`."""
    groups = frame.groupby(list(by), sort=False)
    cells = DataFrame({"score": means(frame, by, "score", 100, within), "samples": groups.size()})
    cells["tokens"] = Series(whole(groups["budget_tokens"].mean()), cells.index, dtype=object)
    cells["truncated"] = groups["truncated"].sum().astype(int)
    return cells.reset_index()


def cell_records(cells: DataFrame) -> list[dict[str, Any]]:
    """Cells of tasks as `summary.json` has them; scores from 0 to 1."""
    listed = cells.assign(length=[length or None for length in cells["length"].tolist()])
    return [
        {**{name: one[name] for name in (*CELL, "tokens")}, "accuracy": one["score"].value / 100}
        | {"error": None if one["score"].error is None else one["score"].error / 100}
        | {"interval": one["score"].interval and [end / 100 for end in one["score"].interval]}
        | {"samples": one["samples"], "truncated": one["truncated"], "all_held": one["score"].held}
        for one in listed.to_dict("records")
    ]


def curves(rows: Iterable[Row]) -> DataFrame:
    """Perplexities of runs over texts, a line per policy and budget in the order of appearance.

    `tokens` is what is held per layer and row, None for the full cache; `perplexity` a `Mean` over all tokens of all
    texts, not a number where a loss is none, infinite where it is too large; `by_position` one per bin, None where no
    text reaches; `predicted` the number of tokens.
    """
    groups = grouped(rows, lambda row: (row["policy"], row["budget"], row["budget_tokens"]))
    records = [
        dict(zip(("policy", "budget", "tokens"), key, strict=True)) | _curve(mine) for key, mine in groups.items()
    ]
    return DataFrame(
        records, columns=["policy", "budget", "tokens", "perplexity", "by_position", "predicted"], dtype=object
    )


def _curve(rows: Sequence[Row]) -> dict[str, Any]:
    losses_of_rows = [[nan if loss is None else loss for loss in row["loss"]] for row in rows]
    losses = [sum(column) for column in zip(*losses_of_rows, strict=True)]
    counts = [sum(column) for column in zip(*(row["count"] for row in rows), strict=True)]
    whole_text = Mean(_perplexity(sum(losses), sum(counts)), held=all(map(nothing_evicted, rows)))
    if isfinite(whole_text.value):
        # A ratio of two sums over texts: its error is that of what each text adds to the mean.
        pairs = zip(losses_of_rows, rows, strict=True)
        rest = [sum(own) - log(whole_text.value) * sum(row["count"]) for own, row in pairs]
        if len(rest) > FEWEST:
            error = whole_text.value * stdev(rest) * sqrt(len(rest)) / sum(counts)
            whole_text = replace(whole_text, error=error)
    bins = [_perplexity(loss, count) if count else None for loss, count in zip(losses, counts, strict=True)]
    return {"perplexity": whole_text, "by_position": bins, "predicted": sum(counts)}


def curve_records(table: DataFrame) -> list[dict[str, Any]]:
    """Perplexities as `summary.json` has them."""
    return [
        {**one, "perplexity": one["perplexity"].value}
        | {"error": one["perplexity"].error, "all_held": one["perplexity"].held}
        for one in table.to_dict("records")
    ]


def _perplexity(loss: float, count: int) -> float:
    try:
        return exp(loss / count)
    except OverflowError:
        return inf
