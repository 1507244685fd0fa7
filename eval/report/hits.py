"""What caches still held, when answers began, of the tokens that the full cache's answers attend to most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from ..store.results import Row
from ..store.summaries.summary import mean_of
from ..store.summaries.table import Column, Table, Value
from .runs import Run, Variant
from .scores import Line, lines_of, table_of_lines

NOTE = (
    "Of the tokens of a prompt that the full cache's answer attends to most, the share that is held when the answer "
    "begins: the mean over answers, layers and KV heads; then the layer and the KV head with the lowest mean over "
    "answers. What is not held cannot be looked up."
)


def rates_of(rows: Iterable[Row]) -> dict[int, list[float]]:
    """By layer the rates of its KV heads, means over answers; of the answers that have any."""
    found: dict[int, list[list[float]]] = {}
    for row in rows:
        for layer, rates in (row.get("hit_rate") or {}).items():
            found.setdefault(int(layer), []).append(rates)
    return {layer: [fmean(head) for head in zip(*rates, strict=True)] for layer, rates in sorted(found.items())}


def rates_at(run: Run, variant: Variant) -> dict[int, list[float]]:
    """Over all answers of a policy and budget."""
    return rates_of(row for row in run.rows if (row["policy"], row["budget"]) == variant)


def _hits(run: Run, variant: Variant) -> list[dict[str, list[float]]]:
    return [row["hit_rate"] for row in run.answers(variant) if row.get("hit_rate")]


def hit_table(runs: Sequence[Run]) -> Table | None:
    """One row per policy and budget, over all tasks."""
    columns = [
        Column("hit rate (%)", 1),
        Column("lowest layer (%)", 1),
        Column("which"),
        Column("lowest KV head (%)", 1),
    ]

    def values(line: Line) -> list[Value]:
        rates = rates_at(line.run, line.variant)
        if not rates:
            return []
        means = {layer: fmean(heads) for layer, heads in rates.items()}
        lowest = min(means, key=means.__getitem__)
        worst = min(min(heads) for heads in rates.values())
        answers = [[rate for heads in hits.values() for rate in heads] for hits in _hits(line.run, line.variant)]
        return [mean_of(map(fmean, answers), 100), 100 * means[lowest], str(lowest), 100 * worst]

    return table_of_lines("hits", "What is held of what counts", lines_of(runs), columns, values, NOTE, best=[0])
