"""Means with their standard errors, over groups of a long DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log, sqrt
from statistics import stdev
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from ..caches.budgets import FULL

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
    """

    value: float
    error: float | None = None
    held: bool = False
    interval: tuple[float, float] | None = None

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
    present = frame.dropna(subset=[column])
    values = scale * present[column]
    binary = values.isin((0, scale)) if scale == 100 else False
    present = present.assign(value=values, binary=binary, held=present.get("held", False))
    parts = present.groupby([*by, *within], sort=False)
    inner = parts["value"].agg(["mean", "var", "size"]).join(parts[["binary", "held"]].all())
    inner = inner.assign(noise=(inner["var"] / inner["size"]).where(inner["size"] > 1, 0.0), inverse=1 / inner["size"])
    groups = inner.groupby(list(by), sort=False)
    outer = groups[["noise", "size", "inverse"]].sum().join(groups[["binary", "held"]].all())
    outer = outer.assign(value=groups["mean"].mean(), parts=groups.size())
    results = []
    for one in outer.to_dict("records"):
        tells = one["size"] - one["parts"] >= FEWEST
        # Of parts that count the same: as many answers as leave a mean of all of them as uncertain.
        count = one["parts"] ** 2 / one["inverse"]
        interval = wilson(one["value"] / scale, count) if tells and one["binary"] else None
        error = sqrt(one["noise"]) / one["parts"] if tells else None
        results.append(Mean(one["value"], error, bool(one["held"]), interval))
    return Series(results, outer.index, dtype=object)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Where a share of `count` answers lies with a probability of 95 %, in percent (Wilson 1927). Unlike a standard
    error it does not say of 8 right answers of 8 that the next one must be right."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def too_hard(frame: DataFrame) -> str:
    """A sentence on the tasks of which the full cache's score is too near to nothing; empty if there is none."""
    scores = means(frame[frame["policy"] == FULL], ["task"], "score", 100).items()
    hard = [f"{mean.value:.1f} % of {task}" for task, mean in scores if mean.value <= max(2 * (mean.error or 0), LEAST)]
    if not hard:
        return ""
    return (
        f"The full cache itself scores {', '.join(hard)}: too near to nothing to judge a policy by. Take easier "
        "questions, more of them, or another model."
    )


def cells_of(frame: DataFrame, by: Sequence[str] = CELL, within: Sequence[str] = ()) -> DataFrame:
    """Per group: the score in percent, `samples`, tokens held per layer and row (the rounded mean; None for the full
    cache), and how many prompts lost their middle. Arguments as of `means`."""
    groups = frame.groupby(list(by), sort=False)
    cells = DataFrame({"score": means(frame, by, "score", 100, within), "samples": groups.size()})
    tokens = [None if mean != mean else round(mean) for mean in groups["budget_tokens"].mean()]
    truncated = groups["truncated"].sum().astype(int)
    return cells.assign(tokens=Series(tokens, cells.index, dtype=object), truncated=truncated).reset_index()


def cell_records(cells: DataFrame) -> list[dict[str, Any]]:
    """Cells of tasks as `summary.json` has them; scores from 0 to 1."""
    return [
        {name: one[name] or None if name == "length" else one[name] for name in (*CELL, "tokens")}
        | {
            "accuracy": one["score"].value / 100,
            "error": None if (error := one["score"].error) is None else error / 100,
        }
        | {"interval": one["score"].interval and [end / 100 for end in one["score"].interval]}
        | {"samples": one["samples"], "truncated": one["truncated"], "all_held": one["score"].held}
        for one in cells.to_dict("records")
    ]


def curves(texts: DataFrame) -> DataFrame:
    """Perplexities of runs over texts, a line per run, policy and budget in the order of appearance.

    `tokens` is what is held per layer and row, None for the full cache; `perplexity` a `Mean` over all tokens of all
    texts, not a number where a loss is none, infinite where it is too large; `by_position` one per bin, not a number
    where no text reaches; `predicted` the number of tokens.
    """
    groups = texts.groupby(["run", "budget", "policy"], sort=False)
    lines = [dict(zip(("run", "budget", "policy"), key, strict=True)) | _curve(mine) for key, mine in groups]
    columns = ["run", "budget", "policy", "tokens", "perplexity", "by_position", "predicted"]
    return DataFrame(lines, columns=columns, dtype=object)


def _curve(texts: DataFrame) -> dict[str, Any]:
    losses, counts = np.array(texts["loss"].tolist(), float), np.array(texts["count"].tolist())
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity, bins = np.exp(losses.sum() / counts.sum()), np.exp(losses.sum(0) / counts.sum(0))
    value, error = float(perplexity), None
    if isfinite(value) and len(texts) > FEWEST:
        # A ratio of two sums over texts: its error is that of what each text adds to the mean.
        error = value * stdev(losses.sum(1) - log(value) * counts.sum(1)) * sqrt(len(texts)) / int(counts.sum())
    whole = Mean(value, error, bool(texts["held"].all()))
    return {"tokens": texts["budget_tokens"].iloc[0], "perplexity": whole, "by_position": bins.tolist()} | {
        "predicted": int(counts.sum())
    }


def curve_records(table: DataFrame) -> list[dict[str, Any]]:
    """Perplexities as `summary.json` has them."""
    return [
        {**one, "perplexity": one["perplexity"].value}
        | {"error": one["perplexity"].error, "all_held": one["perplexity"].held}
        for one in table.drop(columns="run").to_dict("records")
    ]
